// Arguments of the forward and backward kernels, on tensor cores or not.
#pragma once

#include "../../common/cuda/launch.cuh"
#include "../call.h"
#include "../mask.h"

namespace crate_kernels::mssa {

// A tensor of tokens; strides in elements.
struct Rows {
  void* data;
  int64_t batch, head, row, channel;
  bool wide;  // every row is whole packs of 16 bytes
};

// Access to all tensors of a call. wide: in packs of 16 bytes, because all rows are whole packs.
struct Access {
  int head_dim;
  bool wide;
};

// One head of a tensor, from its first token on; strides in elements.
template <class T>
struct View {
  T* data;
  int64_t row, channel;
};

// Packed tokens are (rows, heads, channels), others (batch, heads, rows, channels).
inline Rows rows_of(const Tensor& t, bool packed) {
  Rows r = {t.data_ptr(), packed ? 0 : t.stride(0), t.stride(1), t.stride(packed ? 0 : 2), t.stride(packed ? 2 : 3),
            false};
  const auto whole = [&](int64_t elements) { return elements * static_cast<int64_t>(t.element_size()) % 16 == 0; };
  r.wide = reinterpret_cast<uintptr_t>(r.data) % 16 == 0 && whole(t.size(t.dim() - 1)) && r.channel == 1;
  for (int64_t d = 0; d + 1 < t.dim(); ++d) r.wide = r.wide && (t.size(d) == 1 || whole(t.stride(d)));
  return r;
}

template <class T>
T* pointer(const std::optional<Tensor>& t) {
  return t.has_value() ? static_cast<T*>(t->data_ptr()) : nullptr;
}

inline int head_dim_of(const Tensor& w) {
  const int64_t head_dim = w.size(w.dim() - 1);
  STD_TORCH_CHECK(head_dim >= 1 && head_dim <= 256, "head_dim must be from 1 to 256, got ", head_dim);
  return static_cast<int>(head_dim);
}

// Another range of the rows' sequence, which they meet instead of themselves. Places count from the sequence's start.
struct Range {
  Rows g;                           // gradient of its out
  const float *lse, *delta, *dlse;  // (sequences, nheads, count)
  const uint8_t* keep;              // (sequences, count); null: every token is a key
  int count, start;                 // its tokens, and the place of the first
  int row_start;                    // place of the first row
  int first_head, nheads;           // heads before those that are here, and all heads: dropout counts them
};

struct Problem {
  Rows w, keys, out, g, dw;   // keys: w, or the cache that w was appended to; g: gradient of out
  float* lse;                 // (sequences, nheads, seqlen), packed (nheads, total); null: not wanted
  float* delta;               // scratch of lse's size
  float* low;                 // the same: what rounding took from lse; null: not known
  float *largest, *levels;    // the same, of phi = "threshold": the largest score, and the threshold times the sum of
                              // weights that are at most 1. Where they are wanted, a forward writes nothing else
  const float* dlse;          // of lse's size; null: no gradient
  const uint8_t* keep;        // (sequences, seqlen); null: every key
  int32_t* held;              // lengths of the cache before the new tokens, which `keep` then masks; null: no cache
  const int32_t* cu_seqlens;  // (sequences + 1,); null: not packed
  const int64_t* seed;        // null: no dropout
  int sequences, nheads, seqlen, total;  // seqlen: the longest; total: packed rows
  int capacity;                          // of the cache
  int blocks, groups;                    // per head: of rows, and of channels of the output
  Access access;
  Dtype dtype;
  float scale, threshold, keep_factor;
  uint32_t drop_last;  // the largest Philox word that is dropped
  Mask mask;
  bool select;                    // phi = "threshold"
  bool values, products, scores;  // backward: has terms with g_i, with g_i.w_j, with a gradient of scores
  Dtype results;                  // of out and dw
  Range others;                   // the range whose tokens are `keys`, if it is not the rows'
};

// A cache that the tokens of a call were appended to. Its lengths do not count them yet.
struct Cache {
  const Tensor &data, &lengths;
};

// The problem of a forward; head_dim is checked.
inline Problem problem_of(const Tensor& w, const MssaCall& call, const Cache* cache, const Tensor& out,
                          const Tensor& lse) {
  const bool packed = call.packed();
  Problem p = {};
  p.w = p.keys = rows_of(w, packed);
  p.out = rows_of(out, packed);
  p.access = {head_dim_of(w), p.w.wide && p.out.wide};
  if (cache != nullptr) {
    p.keys = rows_of(cache->data, false);
    p.access.wide = p.access.wide && p.keys.wide;
    p.held = static_cast<int32_t*>(cache->lengths.data_ptr());
    p.capacity = static_cast<int>(cache->data.size(2));
  }
  p.lse = lse.numel() > 0 ? static_cast<float*>(lse.data_ptr()) : nullptr;
  p.keep = pointer<const uint8_t>(call.key_padding_mask);
  p.cu_seqlens = pointer<const int32_t>(call.cu_seqlens);
  p.seed = pointer<const int64_t>(call.seed);
  p.sequences = static_cast<int>(call.sequences(w));
  p.nheads = static_cast<int>(w.size(1));
  p.seqlen = static_cast<int>(packed ? call.max_seqlen : w.size(2));
  p.total = static_cast<int>(w.size(packed ? 0 : 2));
  p.dtype = p.results = dtype_of(w);
  p.scale = static_cast<float>(call.scale);
  p.select = call.threshold.has_value();
  p.threshold = static_cast<float>(call.threshold.value_or(0.0));
  p.mask = call.mask;
  p.keep_factor = 1.0f;
  if (call.seed.has_value()) {
    p.keep_factor = call.keep_factor();
    // p > 0 drops at least one word; for p = 0 the API draws no seed.
    p.drop_last = static_cast<uint32_t>(call.keep_from() - 1);
  }
  return p;
}

// A launch with `blocks` blocks per head.
inline Launch launch_of(Problem& p, int blocks, int threads, int64_t shared_bytes, int32_t device) {
  p.blocks = blocks;
  const int64_t heads = static_cast<int64_t>(p.sequences) * p.nheads;
  return {heads * blocks, threads, shared_bytes, 1, current_stream(device)};
}

// The problem of a backward, which writes `dw`; `delta` is scratch of twice the size of lse, with phi = "threshold" of
// three times.
inline Problem problem_of(const std::optional<Tensor>& dout, const std::optional<Tensor>& dlse, const Tensor& w,
                          const Tensor& out, const Tensor& lse, const MssaCall& call, const Tensor& dw,
                          const Tensor& delta) {
  Problem p = problem_of(w, call, nullptr, out, lse);
  p.dw = rows_of(dw, call.packed());
  p.g = dout.has_value() ? rows_of(*dout, call.packed()) : p.w;
  p.access.wide = p.access.wide && p.dw.wide && p.g.wide;
  p.dlse = pointer<const float>(dlse);
  p.delta = static_cast<float*>(delta.data_ptr());
  const int64_t numbers = lse.numel();
  // The selection of phi = "threshold" is piecewise constant: scores get a gradient from lse only.
  p.values = dout.has_value();
  p.products = p.values && !p.select;
  p.scores = p.products || dlse.has_value();
  // lse, which is rounded, would not say exactly what the forward selected.
  if (p.select && p.values) {
    p.largest = p.delta + numbers;
    p.levels = p.largest + numbers;
  } else {
    p.low = p.delta + numbers;
  }
  return p;
}

}  // namespace crate_kernels::mssa
