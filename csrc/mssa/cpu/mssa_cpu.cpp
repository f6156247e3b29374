// The CPU ops of subspace attention: cut tensors into heads, and share heads among threads.
#include <algorithm>
#include <optional>
#include <vector>

#include "../../common/packing.h"
#include "../op_checks.h"
#include "host.h"

namespace crate_kernels {
namespace {

constexpr int64_t kBlock = 64;         // rows of a tile
constexpr int64_t kCombineRows = 256;  // rows of a task that sums shares

// The tensors of a call; null: absent.
struct Tensors {
  const Tensor &w, &out, &lse;
  const Tensor *dout = nullptr, *dlse = nullptr, *dw = nullptr;
};

std::vector<MssaHead> list_heads(const Tensors& t, const MssaCall& call) {
  const bool packed = call.packed();
  const int64_t nheads = t.w.size(1), total = t.w.size(packed ? 0 : 2), batch = call.sequences(t.w);
  const int32_t* const bounds = packed ? static_cast<const int32_t*>(call.cu_seqlens->data_ptr()) : nullptr;
  const HeadViews w(&t.w, packed), out(&t.out, packed), dout(t.dout, packed), dw(t.dw, packed);
  float* const lse = static_cast<float*>(t.lse.data_ptr());
  const float* const dlse = t.dlse == nullptr ? nullptr : static_cast<const float*>(t.dlse->data_ptr());
  std::vector<MssaHead> heads;
  heads.reserve(batch * nheads);
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t first = packed ? std::clamp<int64_t>(bounds[b], 0, total) : 0;
    const int64_t end = packed ? std::clamp<int64_t>(bounds[b + 1], first, total) : total;
    if (end == first) continue;
    for (int64_t h = 0; h < nheads; ++h) {
      MssaHead head = {};
      head.seqlen = head.nkeys = end - first;
      head.itself = true;
      head.counter = static_cast<uint32_t>(b * nheads + h);
      head.w = head.keys = w.at(b, h, first);
      head.out = out.at(b, h, first);
      head.dout = dout.at(b, h, first);
      head.dw = dw.at(b, h, first);
      if (call.key_padding_mask.has_value()) {
        head.key_mask = static_cast<const uint8_t*>(call.key_padding_mask->data_ptr()) + b * total;
      }
      const int64_t row = packed ? h * total + first : (b * nheads + h) * total;
      head.lse = lse + row;
      head.dlse = dlse == nullptr ? nullptr : dlse + row;
      heads.push_back(head);
    }
  }
  return heads;
}

// Sets each head's `next`: the head that the same thread computes after it, if threads take whole heads.
void link(std::vector<MssaHead>& heads, int parts) {
  if (parts > 1) return;
  const auto threads = static_cast<size_t>(torch::stable::get_num_threads());
  for (size_t i = 0; i + threads < heads.size(); ++i) heads[i].next = &heads[i + threads];
}

// Number of parts per head, such that every thread has work.
int parts_of(const std::vector<MssaHead>& heads) {
  int64_t blocks = 1;
  for (const MssaHead& head : heads) blocks = std::max(blocks, (head.seqlen + kBlock - 1) / kBlock);
  return static_cast<int>(std::min(threads_per_head(static_cast<int64_t>(heads.size())), blocks));
}

void forward(Tensor w, MssaCall call, Tensor out, Tensor lse) {
  mssa::check_forward(w, call, out, lse);
  clear_uncovered(call.cu_seqlens, w.size(0), {&out, &lse});
  const MssaProblem p = problem(w, call);
  std::vector<MssaHead> heads = list_heads({w, out, lse}, call);
  const MssaKernels& k = kernels(p);
  const int parts = parts_of(heads);
  link(heads, parts);
  for_each_task(static_cast<int64_t>(heads.size()) * parts, [&](int64_t i, Arena& arena) {
    k.forward(p, heads[i / parts], static_cast<int>(i % parts), parts, arena);
  });
}

void backward(std::optional<Tensor> dout, std::optional<Tensor> dlse, Tensor w, Tensor out, Tensor lse, MssaCall call,
              Tensor dw) {
  mssa::check_backward(dout, dlse, w, out, lse, call, dw);
  clear_uncovered(call.cu_seqlens, w.size(0), {&dw});
  const MssaProblem p = problem(w, call);
  std::vector<MssaHead> heads = list_heads({w, out, lse, dout ? &*dout : nullptr, dlse ? &*dlse : nullptr, &dw}, call);
  const MssaKernels& k = kernels(p);
  const int parts = parts_of(heads);
  link(heads, parts);
  // Every part has its own accumulator. Rows are summed in the order of the parts: every run gives the same bits.
  std::vector<int64_t> offsets = {0};
  for (const MssaHead& head : heads) {
    offsets.push_back(offsets.back() + parts * mssa_partial_size(head.seqlen, p.head_dim));
  }
  const auto partial = allocate_parts(parts == 1 ? 0 : offsets.back());
  for_each_task(static_cast<int64_t>(heads.size()) * parts, [&](int64_t i, Arena& arena) {
    float* const share = parts == 1 ? nullptr : partial.get() + offsets[i / parts];
    k.backward(p, heads[i / parts], static_cast<int>(i % parts), parts, arena, share);
  });
  if (parts == 1) return;
  std::vector<std::pair<int64_t, int64_t>> rows;  // head, first row
  for (int64_t h = 0; h < static_cast<int64_t>(heads.size()); ++h) {
    for (int64_t row = 0; row < heads[h].seqlen; row += kCombineRows) rows.emplace_back(h, row);
  }
  for_each_task(static_cast<int64_t>(rows.size()), [&](int64_t i, Arena&) {
    const auto [h, first] = rows[i];
    const int64_t end = std::min(first + kCombineRows, heads[h].seqlen);
    k.combine(p, heads[h], parts, partial.get() + offsets[h], first, end);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(crate_kernels_C, m) {
  m.def("mssa_fwd(" CRATE_MSSA_FWD ") -> ()");
  m.def("mssa_bwd(" CRATE_MSSA_BWD ") -> ()");
}

CRATE_IMPLEMENT(m) {
  m.impl(CRATE_KERNEL("mssa_fwd", &forward));
  m.impl(CRATE_KERNEL("mssa_bwd", &backward));
}

}  // namespace crate_kernels
