#include "arena.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace crate_kernels {
namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr int64_t kMaxKept = 0;  // the sanitizer sees what is read beyond the end of an arena of the right size
#else
constexpr int64_t kMaxKept = 1 << 20;  // bytes
#endif

// Memory of a thread's last arena, kept for the next one. Allocating and freeing it takes a tenth of a call on a few
// tokens, and longer if the system takes the pages back.
struct Spare {
  char* data = nullptr;
  int64_t size = 0;

  ~Spare() { std::free(data); }
};
thread_local Spare spare;

}  // namespace

Arena::~Arena() {
  if (size_ > spare.size && size_ <= kMaxKept) {
    std::swap(data_, spare.data);
    spare.size = size_;
  }
  std::free(data_);
}

char* Arena::reserve(int64_t bytes) {
  if (bytes > size_) {
    std::free(data_);
    data_ = nullptr;
    size_ = 0;
    if (bytes <= spare.size) {
      data_ = std::exchange(spare.data, nullptr);
      size_ = std::exchange(spare.size, 0);
    } else {
      void* data = nullptr;
      if (posix_memalign(&data, 64, static_cast<size_t>(bytes)) != 0) throw std::bad_alloc();
      data_ = static_cast<char*>(data);
      size_ = bytes;
    }
  }
#if defined(__SANITIZE_ADDRESS__)
  // NaN: what is read before it is written shows in results.
  if (data_ != nullptr) std::memset(data_, 0xff, static_cast<size_t>(size_));
#endif
  return data_;
}

}  // namespace crate_kernels
