// The CPU ops of token-statistics attention: tensors to sequences, sequences to threads.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <optional>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "../../common/cpu/capability.h"
#include "../../common/cpu/isa.h"
#include "../../common/cpu/parallel.h"
#include "../../common/tensor.h"
#include "kernels.h"

namespace crate_kernels {
namespace {

const TssaKernels& kernels() {
#if CRATE_X86_LEVELS
  if (capability() >= Capability::avx512) return tssa_avx512;
  if (capability() == Capability::avx2) return tssa_avx2;
#endif
  return tssa_portable;
}

const Tensor* get(const std::optional<Tensor>& t) {
  return t.has_value() ? &*t : nullptr;
}

float* floats(const Tensor* t) {
  return t == nullptr ? nullptr : static_cast<float*>(t->data_ptr());
}

// The tensors of a call; those that a call does not have are null. What is not of w's shape is contiguous.
struct Tensors {
  const Tensor &w, &temp;
  const Tensor *key_padding_mask = nullptr, *cu_seqlens = nullptr, *seed = nullptr, *bias = nullptr;
  const Tensor *out = nullptr, *dout = nullptr, *dw = nullptr, *dtemp = nullptr;
  const Tensor *membership = nullptr, *dmembership = nullptr, *energy = nullptr, *moment = nullptr;
  const Tensor *mass = nullptr, *lengths = nullptr;  // decoding
};

TssaProblem problem(const Tensors& t, double dropout_p) {
  TssaProblem p = {};
  p.dtype = dtype_of(t.w);
  p.nheads = static_cast<int>(t.w.size(1));
  p.head_dim = static_cast<int>(t.w.size(t.w.dim() - 1));
  p.temp = floats(&t.temp);
  p.dropout = t.seed != nullptr;
  if (p.dropout) {
    p.seed = static_cast<uint64_t>(*static_cast<const int64_t*>(t.seed->data_ptr()));
    p.keep_from = static_cast<uint64_t>(std::ceil(dropout_p * 4294967296.0));
    p.keep_factor = static_cast<float>(1.0 / (1.0 - dropout_p));
  }
  return p;
}

TssaView view(const Tensor* t, bool packed, int64_t batch, int64_t token) {
  if (t == nullptr) return {};
  char* const data = static_cast<char*>(t->data_ptr());
  const int64_t item = static_cast<int64_t>(t->element_size());
  if (packed) return {data + token * t->stride(0) * item, t->stride(1), t->stride(0), t->stride(2)};
  return {data + batch * t->stride(0) * item, t->stride(1), t->stride(2), t->stride(3)};
}

std::vector<TssaSequence> list_sequences(const Tensors& t, const TssaProblem& p, bool causal) {
  const bool packed = t.cu_seqlens != nullptr;
  const int64_t total = packed ? t.w.size(0) : t.w.size(2);
  const int64_t batch = packed ? t.cu_seqlens->size(0) - 1 : t.w.size(0);
  const int32_t* const bounds = packed ? static_cast<const int32_t*>(t.cu_seqlens->data_ptr()) : nullptr;
  std::vector<TssaSequence> sequences;
  sequences.reserve(batch);
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t first = packed ? std::clamp<int64_t>(bounds[b], 0, total) : 0;
    const int64_t end = packed ? std::clamp<int64_t>(bounds[b + 1], first, total) : total;
    TssaSequence s = {};
    s.seqlen = end - first;
    s.chunks = (s.seqlen + kTssaChunk - 1) / kTssaChunk;
    s.counter = static_cast<uint32_t>(b * p.nheads);
    s.w = view(&t.w, packed, b, first);
    s.out = view(t.out, packed, b, first);
    s.dout = view(t.dout, packed, b, first);
    s.dw = view(t.dw, packed, b, first);
    const int64_t row = packed ? first : b * p.nheads * total, channels = b * p.nheads * p.head_dim;
    s.tokens = total;
    s.membership = floats(t.membership) + row;
    if (t.dmembership != nullptr) s.dmembership = floats(t.dmembership) + row;
    if (t.energy != nullptr) {
      s.energy = floats(t.energy) + channels;
      s.moment = floats(t.moment) + channels;
    }
    if (t.bias != nullptr) {
      s.bias = floats(t.bias);
      s.bias_tokens = t.bias->size(1);
    }
    if (t.key_padding_mask != nullptr) {
      s.keep = static_cast<const bool*>(t.key_padding_mask->data_ptr()) + b * t.key_padding_mask->stride(0);
      s.keep_stride = t.key_padding_mask->stride(1);
      while (s.first_key < s.seqlen && !s.keep[s.first_key * s.keep_stride]) ++s.first_key;
      if (!causal && s.first_key < s.seqlen) s.first_key = 0;  // a key serves every token
    }
    if (t.lengths != nullptr) {
      s.position = static_cast<const int32_t*>(t.lengths->data_ptr())[b];
      if (s.position > 0) s.first_key = 0;
      s.state_energy = s.energy;
      s.state_moment = s.moment;
      s.state_mass = floats(t.mass) + b * p.nheads;
    }
    sequences.push_back(s);
  }
  return sequences;
}

void run_steps(const TssaProblem& p, const TssaSequence& s, const TssaKernel& kernel, float* staging) {
  for (int i = 0; i < kernel.alone_steps; ++i) {
    const TssaStep& step = kernel.alone[i];
    const int64_t count = step.kind == TssaStep::whole ? 1 : s.chunks;
    for (int64_t n = 0; n < count; ++n) step.run(p, s, step.kind == TssaStep::descending ? count - 1 - n : n, staging);
  }
}

// A thread takes whole sequences, which then stay in its cache, unless there are fewer of them than threads.
void run(const TssaProblem& p, std::vector<TssaSequence>& sequences, const TssaKernel& kernel) {
  const int64_t count = static_cast<int64_t>(sequences.size()), staging_size = kernels().staging_size(p);
  if (count >= torch::stable::get_num_threads()) {
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
    const TssaStep& step = kernel.shared[i];
    const auto& tasks = step.kind == TssaStep::whole ? wholes : chunks;
    for_each_task(static_cast<int64_t>(tasks.size()), [&](int64_t task, Arena& arena) {
      float* const staging = reinterpret_cast<float*>(arena.reserve(staging_size * sizeof(float)));
      step.run(p, *tasks[task].first, tasks[task].second, staging);
    });
  }
}

void forward(Tensor w, Tensor temp, std::optional<Tensor> key_padding_mask, std::optional<Tensor> cu_seqlens,
             std::optional<Tensor> seed, double dropout_p, Tensor out, Tensor membership, Tensor energy,
             Tensor moment) {
  Tensors t = {w, temp, get(key_padding_mask), get(cu_seqlens), get(seed)};
  t.out = &out;
  t.membership = &membership;
  t.energy = &energy;
  t.moment = &moment;
  const TssaProblem p = problem(t, dropout_p);
  std::vector<TssaSequence> sequences = list_sequences(t, p, false);
  run(p, sequences, kernels().forward);
}

void causal_forward(Tensor w, Tensor temp, std::optional<Tensor> denom_bias, std::optional<Tensor> key_padding_mask,
                    std::optional<Tensor> cu_seqlens, std::optional<Tensor> seed, double dropout_p, Tensor out,
                    Tensor membership) {
  Tensors t = {w, temp, get(key_padding_mask), get(cu_seqlens), get(seed), get(denom_bias)};
  t.out = &out;
  t.membership = &membership;
  const TssaProblem p = problem(t, dropout_p);
  std::vector<TssaSequence> sequences = list_sequences(t, p, true);
  run(p, sequences, kernels().causal_forward);
}

// Run a backward kernel and sum over sequences, in their order.
void run_backward(const Tensors& t, double dropout_p, bool causal, const Tensor* ddenom_bias) {
  const TssaProblem p = problem(t, dropout_p);
  std::vector<TssaSequence> sequences = list_sequences(t, p, causal);
  const int64_t count = static_cast<int64_t>(sequences.size()), head_size = p.nheads;
  std::vector<float> dtemp(count * head_size);
  Arena memory;
  const int64_t tokens = t.membership->numel();
  float* const dlogit = reinterpret_cast<float*>(memory.reserve(tokens * sizeof(float)));
  for (int64_t i = 0; i < count; ++i) {
    sequences[i].dtemp = dtemp.data() + i * head_size;
    sequences[i].dlogit = dlogit + (sequences[i].membership - floats(t.membership));
  }
  run(p, sequences, causal ? kernels().causal_backward : kernels().backward);
  float* const total = floats(t.dtemp);
  std::fill_n(total, p.nheads, 0.0f);
  for (int64_t i = 0; i < count * head_size; ++i) total[i % head_size] += dtemp[i];
  if (ddenom_bias == nullptr) return;
  const int64_t positions = ddenom_bias->size(1);
  for_each_task(p.nheads, [&](int64_t h, Arena&) {
    float* const row = floats(ddenom_bias) + h * positions;
    const float slope = static_cast<float>(p.head_dim) * p.temp[h];
    std::fill_n(row, positions, 0.0f);
    for (const TssaSequence& s : sequences) {
      const int64_t some = std::min(s.seqlen, positions);
      for (int64_t n = 0; n < some; ++n) row[n] += s.dlogit[h * s.tokens + n];
    }
    for (int64_t n = 0; n < positions; ++n) row[n] *= slope;
  });
}

void backward(Tensor dout, std::optional<Tensor> dmembership, Tensor w, Tensor temp, Tensor membership, Tensor energy,
              Tensor moment, std::optional<Tensor> key_padding_mask, std::optional<Tensor> cu_seqlens,
              std::optional<Tensor> seed, double dropout_p, Tensor dw, Tensor dtemp) {
  Tensors t = {w, temp, get(key_padding_mask), get(cu_seqlens), get(seed)};
  t.dout = &dout;
  t.dmembership = get(dmembership);
  t.membership = &membership;
  t.energy = &energy;
  t.moment = &moment;
  t.dw = &dw;
  t.dtemp = &dtemp;
  run_backward(t, dropout_p, false, nullptr);
}

void causal_backward(Tensor dout, std::optional<Tensor> dmembership, Tensor w, Tensor temp,
                     std::optional<Tensor> denom_bias, Tensor membership, std::optional<Tensor> key_padding_mask,
                     std::optional<Tensor> cu_seqlens, std::optional<Tensor> seed, double dropout_p, Tensor dw,
                     Tensor dtemp, std::optional<Tensor> ddenom_bias) {
  Tensors t = {w, temp, get(key_padding_mask), get(cu_seqlens), get(seed), get(denom_bias)};
  t.dout = &dout;
  t.dmembership = get(dmembership);
  t.membership = &membership;
  t.dw = &dw;
  t.dtemp = &dtemp;
  run_backward(t, dropout_p, true, get(ddenom_bias));
}

void decode(Tensor w, Tensor temp, std::optional<Tensor> denom_bias, Tensor energy, Tensor weighted, Tensor mass,
            Tensor lengths, std::optional<Tensor> key_padding_mask, Tensor out, Tensor membership) {
  Tensors t = {w, temp, get(key_padding_mask), nullptr, nullptr, get(denom_bias)};
  t.out = &out;
  t.membership = &membership;
  t.energy = &energy;
  t.moment = &weighted;
  t.mass = &mass;
  t.lengths = &lengths;
  const TssaProblem p = problem(t, 0.0);
  std::vector<TssaSequence> sequences = list_sequences(t, p, true);
  run(p, sequences, kernels().causal_forward);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(crate_kernels_C, m) {
  m.def(
      "tssa_fwd(Tensor w, Tensor temp, Tensor? key_padding_mask, Tensor? cu_seqlens, Tensor? seed, float dropout_p, "
      "Tensor(a!) out, Tensor(b!) membership, Tensor(c!) energy, Tensor(d!) moment) -> ()");
  m.def(
      "tssa_bwd(Tensor dout, Tensor? dmembership, Tensor w, Tensor temp, Tensor membership, Tensor energy, "
      "Tensor moment, Tensor? key_padding_mask, Tensor? cu_seqlens, Tensor? seed, float dropout_p, Tensor(a!) dw, "
      "Tensor(b!) dtemp) -> ()");
  m.def(
      "tssa_causal_fwd(Tensor w, Tensor temp, Tensor? denom_bias, Tensor? key_padding_mask, Tensor? cu_seqlens, "
      "Tensor? seed, float dropout_p, Tensor(a!) out, Tensor(b!) membership) -> ()");
  m.def(
      "tssa_causal_bwd(Tensor dout, Tensor? dmembership, Tensor w, Tensor temp, Tensor? denom_bias, "
      "Tensor membership, Tensor? key_padding_mask, Tensor? cu_seqlens, Tensor? seed, float dropout_p, "
      "Tensor(a!) dw, Tensor(b!) dtemp, Tensor(c!)? ddenom_bias) -> ()");
  m.def(
      "tssa_decode(Tensor w, Tensor temp, Tensor? denom_bias, Tensor(a!) energy, Tensor(b!) weighted, "
      "Tensor(c!) mass, Tensor lengths, Tensor? key_padding_mask, Tensor(d!) out, Tensor(e!) membership) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(crate_kernels_C, CPU, m) {
  m.impl("tssa_fwd", TORCH_BOX(&forward));
  m.impl("tssa_bwd", TORCH_BOX(&backward));
  m.impl("tssa_causal_fwd", TORCH_BOX(&causal_forward));
  m.impl("tssa_causal_bwd", TORCH_BOX(&causal_backward));
  m.impl("tssa_decode", TORCH_BOX(&decode));
}

}  // namespace crate_kernels
