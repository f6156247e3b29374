// The CPU op of decoding: append new tokens to a cache and attend over it. A head is one task, or several if there are
// fewer heads than threads.
#include <algorithm>
#include <cstring>
#include <vector>

#include "../op_checks.h"
#include "host.h"

namespace crate_kernels {
namespace {

constexpr int64_t kMinPart = 256;  // cached tokens per task: with fewer, a task costs more than it saves
// Numbers of the cache per thread: waking a second one costs as much as reading these.
constexpr int64_t kMinShare = 1 << 16;

struct Sequence {
  int64_t start, end;       // cached tokens before the new ones, and with them
  const uint8_t* key_mask;  // not 0: the new token is a key; null: all are
};

void append(const Sequence& s, const MssaView& w, const MssaView& keys, int64_t tokens, int64_t capacity,
            const MssaProblem& p) {
  const int64_t item = itemsize(p.dtype);
  const auto at = [&](const MssaView& v, int64_t token, int64_t d) {
    return static_cast<char*>(v.data) + (token * v.token_stride + d * v.dim_stride) * item;
  };
  const bool whole = w.dim_stride == 1 && keys.dim_stride == 1;
  for (int64_t i = 0, end = s.start; i < tokens && end < capacity; ++i) {
    if (s.key_mask != nullptr && s.key_mask[i] == 0) continue;
    if (whole) {
      std::memcpy(at(keys, end, 0), at(w, i, 0), p.head_dim * item);
    } else {
      for (int d = 0; d < p.head_dim; ++d) std::memcpy(at(keys, end, d), at(w, i, d), item);
    }
    ++end;
  }
}

void decode(Tensor w, Tensor data, Tensor lengths, MssaDecodeCall call, Tensor out, Tensor lse) {
  mssa::check_decode(w, data, lengths, call, out, lse);
  const MssaProblem p = problem(w, call.attention());
  const int64_t batch = w.size(0), nheads = w.size(1), tokens = w.size(2), capacity = data.size(2);
  const int64_t heads = batch * nheads;
  int32_t* const cached_lengths = static_cast<int32_t*>(lengths.data_ptr());
  const uint8_t* const mask =
      call.key_padding_mask ? static_cast<const uint8_t*>(call.key_padding_mask->data_ptr()) : nullptr;
  std::vector<Sequence> sequences(batch);
  std::vector<int32_t> visible(batch * tokens);
  int64_t longest = 0;
  for (int64_t b = 0; b < batch; ++b) {
    Sequence& s = sequences[b];
    const int64_t start = std::clamp<int64_t>(cached_lengths[b], 0, capacity);
    s = {start, start, mask == nullptr ? nullptr : mask + b * tokens};
    for (int64_t i = 0; i < tokens; ++i) {
      if (s.key_mask == nullptr || s.key_mask[i] != 0) s.end = std::min(s.end + 1, capacity);
      visible[b * tokens + i] = static_cast<int32_t>(s.end);
    }
    longest = std::max(longest, s.end);
  }

  const int64_t parts = std::clamp<int64_t>(longest / kMinPart, 1, threads_per_head(heads));
  const int64_t partial_size = tokens * mssa_decode_size(p.head_dim);  // of one part of one head
  const auto partial = allocate_parts(parts == 1 ? 0 : heads * parts * partial_size);

  const HeadViews new_heads(&w, false), cached_heads(&data, false), out_heads(&out, false);
  float* const all_lse = call.need_lse ? static_cast<float*>(lse.data_ptr()) : nullptr;
  const auto head = [&](int64_t i) {
    const int64_t b = i / nheads, h = i % nheads;
    MssaDecode d = {};
    d.w = new_heads.at(b, h);
    d.keys = cached_heads.at(b, h);
    d.out = out_heads.at(b, h);
    d.new_tokens = tokens;
    d.visible = visible.data() + b * tokens;
    d.lse = all_lse == nullptr ? nullptr : all_lse + i * tokens;
    d.partial = partial.get() + i * parts * partial_size;
    d.per_part = (longest + parts - 1) / parts;
    return d;
  };
  const MssaKernels& k = kernels(p);
  const auto append_to = [&](int64_t i) {
    const int64_t b = i / nheads, h = i % nheads;
    append(sequences[b], new_heads.at(b, h), cached_heads.at(b, h), tokens, capacity, p);
  };
  const int64_t numbers = heads * longest * p.head_dim * tokens;
  for (int64_t i = 0; parts > 1 && i < heads; ++i) append_to(i);
  const auto task = [&](int64_t i, Arena&) {
    if (parts == 1) append_to(i);
    k.decode(p, head(i / parts), static_cast<int>(i % parts), static_cast<int>(parts));
  };
  for_each_task(heads * parts, task, 1 + numbers / kMinShare);
  for (int64_t i = 0; parts > 1 && i < heads; ++i) k.decode_combine(p, head(i), static_cast<int>(parts));
  // Last: a call that runs out of memory leaves the cache as long as it was.
  for (int64_t b = 0; b < batch; ++b) cached_lengths[b] = static_cast<int32_t>(sequences[b].end);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(crate_kernels_C, m) {
  m.def("mssa_decode(" CRATE_MSSA_DECODE ") -> ()");
}

CRATE_IMPLEMENT(m) {
  m.impl(CRATE_KERNEL("mssa_decode", &decode));
}

}  // namespace crate_kernels
