#include "arena.h"

#include <cstdlib>
#include <cstring>
#include <new>

namespace crate_kernels {

Arena::~Arena() {
  std::free(data_);
}

char* Arena::reserve(int64_t bytes) {
  if (bytes > size_) {
    std::free(data_);
    void* data = nullptr;
    size_ = 0;
    data_ = nullptr;
    if (posix_memalign(&data, 64, static_cast<size_t>(bytes)) != 0) throw std::bad_alloc();
    data_ = static_cast<char*>(data);
    size_ = bytes;
  }
#if defined(__SANITIZE_ADDRESS__)
  // NaN: what is read before it is written shows in results.
  if (data_ != nullptr) std::memset(data_, 0xff, static_cast<size_t>(size_));
#endif
  return data_;
}

}  // namespace crate_kernels
