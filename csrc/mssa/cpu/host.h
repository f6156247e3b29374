// Turns the arguments of a call into the structs of kernels.h, for all CPU ops of subspace attention.
#pragma once

#include <cstdlib>
#include <memory>
#include <new>

#include "../../common/cpu/capability.h"
#include "../../common/cpu/isa.h"
#include "../../common/cpu/parallel.h"
#include "../../common/plan.h"
#include "../call.h"
#include "kernels.h"

namespace crate_kernels {

inline const MssaKernels& kernels(const MssaProblem& p) {
  const MssaKernels* f32 = mssa_portable.f32;
#if CRATE_X86_LEVELS
  const Capability level = capability(), bf16 = bf16_products();
  if (bf16 >= Capability::avx512_bf16 && p.dtype == Dtype::bf16 && !p.dropout && !p.threshold) {
    return bf16 == Capability::amx ? *mssa_amx.bf16 : *mssa_avx512_bf16.bf16;
  }
  if (level >= Capability::avx512) {
    f32 = mssa_avx512.f32;
  } else if (level == Capability::avx2) {
    f32 = mssa_avx2.f32;
  }
#endif
  return *f32;
}

inline MssaProblem problem(const Tensor& w, const MssaCall& call) {
  MssaProblem p = {};
  p.dtype = p.result = dtype_of(w);
  p.head_dim = static_cast<int>(w.size(w.dim() - 1));
  STD_TORCH_CHECK(p.head_dim >= 1 && p.head_dim <= 256, "head_dim must be from 1 to 256, got ", p.head_dim);
  p.scale = call.scale;
  p.mask = call.mask;
  p.threshold = call.threshold.has_value();
  p.level = static_cast<float>(call.threshold.value_or(0.0));
  p.dropout = call.seed.has_value();
  if (p.dropout) {
    p.seed = static_cast<uint64_t>(*static_cast<const int64_t*>(call.seed->data_ptr()));
    p.keep_from = call.keep_from();
    p.keep_factor = call.keep_factor();
  }
  return p;
}

// The view of one head from `token` on; `batch` is a batch element or a packed sequence.
inline MssaView view(const Tensor& t, bool packed, int64_t batch, int64_t head, int64_t token) {
  const int64_t offset = packed ? token * t.stride(0) + head * t.stride(1)
                                : batch * t.stride(0) + head * t.stride(1) + token * t.stride(2);
  char* const data = static_cast<char*>(t.data_ptr());
  return {data + offset * static_cast<int64_t>(t.element_size()), t.stride(packed ? 0 : 2), t.stride(packed ? 2 : 3)};
}

// The heads of a tensor, null: absent. Reading strides from a tensor is a call into PyTorch: once, not for every head.
class HeadViews {
 public:
  HeadViews(const Tensor* t, bool packed) {
    if (t == nullptr) return;
    const auto item = static_cast<int64_t>(t->element_size());
    first_ = view(*t, packed, 0, 0, 0);
    batch_bytes_ = packed ? 0 : t->stride(0) * item;
    head_bytes_ = t->stride(1) * item;
    token_bytes_ = first_.token_stride * item;
  }

  MssaView at(int64_t batch, int64_t head, int64_t token = 0) const {
    if (first_.data == nullptr) return first_;
    char* const data =
        static_cast<char*>(first_.data) + batch * batch_bytes_ + head * head_bytes_ + token * token_bytes_;
    return {data, first_.token_stride, first_.dim_stride};
  }

 private:
  MssaView first_ = {};
  int64_t batch_bytes_ = 0, head_bytes_ = 0, token_bytes_ = 0;
};

// Memory for the results of parts that are summed later, aligned to whole lines of the cache.
inline std::unique_ptr<float, decltype(&std::free)> allocate_parts(int64_t floats) {
  auto* const memory = static_cast<float*>(std::aligned_alloc(64, floats * sizeof(float)));
  if (memory == nullptr && floats != 0) throw std::bad_alloc();
  return {memory, &std::free};
}

// Threads per head if there are fewer heads than threads, otherwise 1.
inline int64_t threads_per_head(int64_t heads) {
  const int64_t threads = torch::stable::get_num_threads();
  return heads == 0 || threads <= heads ? 1 : (threads + heads - 1) / heads;
}

}  // namespace crate_kernels
