// Fetches what a thread writes and reads next into its second-level cache, while it multiplies.
#pragma once

#include "../../common/cpu/vec.h"
#include "kernels.h"

namespace {

// Rows of tensors, some at each call, in the order in which they were added.
//
// Without it a thread waits for the rows of a head's tokens and of its results. After 16 unfinished fetches a core
// waits for the next one: so a few are issued at a time, between the parts of a product.
class Ahead {
 public:
  // Adds tokens [0, count) of a view whose rows lie in one piece; others are left to the processor.
  void add(const crate_kernels::MssaView& view, int64_t count, int head_dim, crate_kernels::Dtype dtype) {
    if (view.data == nullptr || view.dim_stride != 1 || count == 0 || added_ == kMax) return;
    const int64_t size = crate_kernels::itemsize(dtype);
    tensors_[added_++] = {reinterpret_cast<uintptr_t>(view.data), view.token_stride * size, head_dim * size, count};
    total_rows_ += count;
  }

  // Shares the rows out among `calls` calls of some().
  void share_among(int64_t calls) { share_ = calls > 0 ? (total_rows_ + calls - 1) / calls : 0; }

  CRATE_INLINE void some() {
    for (int64_t left = share_; left > 0 && next_tensor_ < added_; --left) {
      const Tensor& t = tensors_[next_tensor_];
      const uintptr_t row = t.data + next_row_ * t.stride;
      for (uintptr_t line = row & ~(kLine - 1); line < row + t.width; line += kLine) {
        __builtin_prefetch(reinterpret_cast<const void*>(line), 0, 2);
      }
      if (++next_row_ == t.rows) {
        next_row_ = 0;
        ++next_tensor_;
      }
    }
  }

 private:
  struct Tensor {
    uintptr_t data;
    int64_t stride, width;  // bytes
    int64_t rows;
  };
  static constexpr int kMax = 4;
  static constexpr uintptr_t kLine = 64;

  Tensor tensors_[kMax];
  int added_ = 0, next_tensor_ = 0;
  int64_t total_rows_ = 0, next_row_ = 0, share_ = 0;
};

}  // namespace
