// Memory that a kernel cannot leave unseen.
#pragma once

#include <cstdint>

#include <sys/mman.h>
#include <unistd.h>

#include <torch/headeronly/util/Exception.h>

namespace emulator {

inline int64_t page() {
  static const int64_t size = sysconf(_SC_PAGESIZE);
  return size;
}

// Whole pages of memory, with an inaccessible page on either side.
class Guarded {
 public:
  explicit Guarded(int64_t bytes) : size_((bytes + page() - 1) / page() * page() + 2 * page()) {
    base_ = static_cast<unsigned char*>(mmap(nullptr, size_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    STD_TORCH_CHECK(base_ != MAP_FAILED, "no memory for the emulator");
    if (size_ > 2 * page()) mprotect(begin(), size_ - 2 * page(), PROT_READ | PROT_WRITE);
  }
  ~Guarded() { munmap(base_, size_); }
  Guarded(const Guarded&) = delete;
  unsigned char* begin() const { return base_ + page(); }
  unsigned char* end() const { return base_ + size_ - page(); }

 private:
  int64_t size_;
  unsigned char* base_;
};

}  // namespace emulator
