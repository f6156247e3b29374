// Memory that a thread keeps between the tasks of one call.
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

  // Returns at least `bytes` bytes, aligned to a cache line. Memory reserved before is freed.
  char* reserve(int64_t bytes);

 private:
  char* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace crate_kernels
