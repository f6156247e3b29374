#include "arena.h"

#include <cstdlib>
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
  return data_;
}

}  // namespace crate_kernels
