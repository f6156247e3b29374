// Memory that a thread keeps from task to task of one call.
#pragma once

#include <stdint.h>

namespace crate_kernels {

// Not inline: instruction-set units and portable ones share it.
class Arena {
 public:
  Arena() = default;
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // At least `bytes` bytes on a cache line; what was reserved before is gone.
  char* reserve(int64_t bytes);

 private:
  char* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace crate_kernels
