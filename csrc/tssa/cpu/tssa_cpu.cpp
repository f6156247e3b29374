// The CPU ops of token-statistics attention: cut tensors into sequences, and share sequences among threads.
#include <algorithm>
#include <optional>
#include <vector>

#include "../../common/cpu/capability.h"
#include "../../common/cpu/isa.h"
#include "../../common/cpu/parallel.h"
#include "../../common/packing.h"
#include "../../common/plan.h"
#include "../op_checks.h"
#include "kernels.h"

namespace crate_kernels {
namespace {

const TssaKernels& kernels() {
#if CRATE_X86_LEVELS
  switch (capability()) {
    case Capability::amx:
    case Capability::avx512_bf16:
      return tssa_avx512_bf16;
    case Capability::avx512:
      return tssa_avx512;
    case Capability::avx2:
      return tssa_avx2;
    case Capability::portable:
      break;
  }
#endif
  return tssa_portable;
}

float* floats(const std::optional<Tensor>& t) {
  return t.has_value() ? static_cast<float*>(t->data_ptr()) : nullptr;
}

double* doubles(const std::optional<Tensor>& t) {
  return t.has_value() ? static_cast<double*>(t->data_ptr()) : nullptr;
}

template <class Args>
TssaCpuProblem problem(const Args& t) {
  TssaCpuProblem p = {};
  p.dtype = dtype_of(t.w);
  p.nheads = static_cast<int>(t.w.size(1));
  p.head_dim = static_cast<int>(t.w.size(t.w.dim() - 1));
  p.temp = floats(t.temp);
  p.dropout = t.call.seed.has_value();
  if (p.dropout) {
    p.seed = static_cast<uint64_t>(*static_cast<const int64_t*>(t.call.seed->data_ptr()));
    p.keep_from = t.call.keep_from();
    p.keep_factor = t.call.keep_factor();
  }
  return p;
}

TssaCpuTensor<char> tokens_of(const Tensor& t, bool packed, int64_t sequence, int64_t first) {
  char* const data = static_cast<char*>(t.data_ptr());
  const int64_t item = static_cast<int64_t>(t.element_size());
  if (packed) return {data + first * t.stride(0) * item, t.stride(1), t.stride(0), t.stride(2)};
  return {data + sequence * t.stride(0) * item, t.stride(1), t.stride(2), t.stride(3)};
}

// The sequences of a call, with what a forward and a backward have in common; add(sequence, its number, its first
// packed row, its place in a tensor with a number per head and token) adds the rest.
template <class Args, class Add>
std::vector<TssaSequence> list_sequences(const Args& t, const TssaCpuProblem& p, const Add& add) {
  const bool packed = t.call.packed();
  const int64_t total = packed ? t.w.size(0) : t.w.size(2), count = t.call.nsequences(t.w);
  const int32_t* const bounds = packed ? static_cast<const int32_t*>(t.call.cu_seqlens->data_ptr()) : nullptr;
  std::vector<TssaSequence> sequences;
  sequences.reserve(count);
  for (int64_t b = 0; b < count; ++b) {
    const int64_t first = packed ? std::clamp<int64_t>(bounds[b], 0, total) : 0;
    const int64_t end = packed ? std::clamp<int64_t>(bounds[b + 1], first, total) : total;
    TssaSequence s = {};
    s.seqlen = end - first;
    s.chunks = (s.seqlen + kTssaChunk - 1) / kTssaChunk;
    s.counter = static_cast<uint32_t>(b * p.nheads);
    s.w = tokens_of(t.w, packed, b, first);
    const int64_t row = packed ? first : b * p.nheads * total;
    s.membership = {floats(t.membership) + row, total, 1, 0};
    if (!t.causal) {
      s.energy = floats(t.energy) + b * p.nheads * p.head_dim;
      s.moment = floats(t.moment) + b * p.nheads * p.head_dim;
    }
    s.bias = floats(t.denom_bias);
    s.bias_tokens = t.denom_bias.has_value() ? t.denom_bias->size(1) : 0;
    if (t.call.key_padding_mask.has_value()) {
      const Tensor& mask = *t.call.key_padding_mask;
      s.key_mask = {static_cast<const uint8_t*>(mask.data_ptr()) + b * mask.stride(0), 0, mask.stride(1), 0};
      while (s.first_key < s.seqlen && *s.key_mask.at(0, s.first_key) == 0) ++s.first_key;
      if (!t.causal && s.first_key < s.seqlen) s.first_key = 0;  // a key serves every token
    }
    add(s, b, first, row);
    sequences.push_back(s);
  }
  return sequences;
}

void run_steps(const TssaCpuProblem& p, const TssaSequence& s, const TssaKernel& kernel, float* staging) {
  for (int i = 0; i < kernel.alone_steps; ++i) {
    const TssaKernelStep& step = kernel.alone[i];
    const int64_t count = step.kind == TssaKernelStep::whole ? 1 : s.chunks;
    for (int64_t n = 0; n < count; ++n)
      step.run(p, s, step.kind == TssaKernelStep::descending ? count - 1 - n : n, staging);
  }
}

// A thread takes whole sequences, which then stay in its cache, unless there are so few sequences that more threads
// make up for what sharing them costs.
void run(const TssaCpuProblem& p, std::vector<TssaSequence>& sequences, const TssaKernel& kernel) {
  if (p.nheads == 0) return;  // every result is empty, and memory for no number is null
  const int64_t count = static_cast<int64_t>(sequences.size()), staging_size = kernels().staging_size(p);
  if (kernel.shared_cost * count >= torch::stable::get_num_threads()) {
    for_each_task(count, [&](int64_t i, Arena& arena) {
      TssaSequence s = sequences[i];
      float* const staging =
          reinterpret_cast<float*>(arena.reserve((staging_size + kernel.work_size(p, s.chunks)) * sizeof(float)));
      s.work = staging + staging_size;
      run_steps(p, s, kernel, staging);
    });
    return;
  }
  Arena shared;
  int64_t size = 0;
  for (const TssaSequence& s : sequences) size += kernel.work_size(p, s.chunks);
  float* work = reinterpret_cast<float*>(shared.reserve(size * sizeof(float)));
  std::vector<std::pair<const TssaSequence*, int64_t>> wholes, chunks;
  for (TssaSequence& s : sequences) {
    s.work = work;
    work += kernel.work_size(p, s.chunks);
    wholes.emplace_back(&s, 0);
    for (int64_t chunk = 0; chunk < s.chunks; ++chunk) chunks.emplace_back(&s, chunk);
  }
  for (int i = 0; i < kernel.shared_steps; ++i) {
    const TssaKernelStep& step = kernel.shared[i];
    const auto& tasks = step.kind == TssaKernelStep::whole ? wholes : chunks;
    for_each_task(static_cast<int64_t>(tasks.size()), [&](int64_t task, Arena& arena) {
      float* const staging = reinterpret_cast<float*>(arena.reserve(staging_size * sizeof(float)));
      step.run(p, *tasks[task].first, tasks[task].second, staging);
    });
  }
}

// Adds the tokens of a step, those that are keys, to the lengths of a cache.
void advance(const TssaForwardArgs& t) {
  int32_t* const lengths = static_cast<int32_t*>(t.lengths->data_ptr());
  const int64_t batch = t.w.size(0), seqlen = t.w.size(2);
  for (int64_t b = 0; b < batch; ++b) {
    int64_t keys = seqlen;
    if (t.call.key_padding_mask.has_value()) {
      const Tensor& mask = *t.call.key_padding_mask;
      const uint8_t* const row = static_cast<const uint8_t*>(mask.data_ptr()) + b * mask.stride(0);
      keys = 0;
      for (int64_t n = 0; n < seqlen; ++n) keys += row[n * mask.stride(1)] != 0;
    }
    lengths[b] += static_cast<int32_t>(keys);
  }
}

void forward(const TssaForwardArgs& t) {
  check_tssa_forward(t);
  clear_uncovered(t.call.cu_seqlens, t.w.size(0), {&t.out, &t.membership});
  const TssaCpuProblem p = problem(t);
  auto sequences = list_sequences(t, p, [&](TssaSequence& s, int64_t b, int64_t first, int64_t) {
    s.out = tokens_of(t.out, t.call.packed(), b, first);
    if (!t.lengths.has_value()) return;
    s.position = std::max(static_cast<const int32_t*>(t.lengths->data_ptr())[b], 0);
    if (s.position > 0) s.first_key = 0;
    s.state_energy = doubles(t.energy) + b * p.nheads * p.head_dim;
    s.state_moment = doubles(t.moment) + b * p.nheads * p.head_dim;
    s.state_mass = doubles(t.mass) + b * p.nheads;
  });
  run(p, sequences, t.causal ? kernels().causal_forward : kernels().forward);
  if (t.lengths.has_value()) advance(t);
}

// Sums over sequences, in their order.
void backward(const TssaBackwardArgs& t) {
  check_tssa_backward(t);
  clear_uncovered(t.call.cu_seqlens, t.w.size(0), {&t.dw});
  const TssaCpuProblem p = problem(t);
  const int64_t count = t.call.nsequences(t.w);
  std::vector<double> dtemp(count * p.nheads);
  Arena memory;
  float* const dlogit = reinterpret_cast<float*>(memory.reserve(t.membership.numel() * sizeof(float)));
  auto sequences = list_sequences(t, p, [&](TssaSequence& s, int64_t b, int64_t first, int64_t row) {
    s.dout = tokens_of(t.dout, t.call.packed(), b, first);
    s.dw = tokens_of(t.dw, t.call.packed(), b, first);
    s.dtemp = dtemp.data() + b * p.nheads;
    s.dlogit = {dlogit + row, s.membership.head, 1, 0};
    if (t.dmembership.has_value()) s.dmembership = {floats(t.dmembership) + row, s.membership.head, 1, 0};
  });
  run(p, sequences, t.causal ? kernels().causal_backward : kernels().backward);
  for (int64_t h = 0; h < p.nheads; ++h) {
    double total = 0.0;
    for (int64_t b = 0; b < count; ++b) total += dtemp[b * p.nheads + h];
    static_cast<float*>(t.dtemp.data_ptr())[h] = static_cast<float>(total);
  }
  if (!t.ddenom_bias.has_value()) return;
  const int64_t positions = t.ddenom_bias->size(1);
  for_each_task(p.nheads, [&](int64_t h, Arena&) {
    float* const row = floats(t.ddenom_bias) + h * positions;
    const float slope = static_cast<float>(p.head_dim) * p.temp[h];
    std::fill_n(row, positions, 0.0f);
    for (const TssaSequence& s : sequences) {
      const int64_t some = std::min(s.seqlen, positions);
      for (int64_t n = 0; n < some; ++n) row[n] += *s.dlogit.at(h, n);
    }
    for (int64_t n = 0; n < positions; ++n) row[n] *= slope;
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(crate_kernels_C, m) {
  m.def(CRATE_TSSA_FWD);
  m.def(CRATE_TSSA_BWD);
}

CRATE_IMPLEMENT(m) {
  m.impl(CRATE_KERNEL("tssa_fwd", &forward));
  m.impl(CRATE_KERNEL("tssa_bwd", &backward));
}

}  // namespace crate_kernels
