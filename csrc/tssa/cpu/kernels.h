// The kernels that each instruction-set unit offers to tssa_cpu.cpp: plain structs and function pointers only.
#pragma once

#include <stdint.h>

#include "../../common/dtype.h"

// Units of different levels call these functions. A copy that the linker shares could use instructions that the machine
// lacks.
#define CRATE_ALWAYS_INLINE inline __attribute__((always_inline))

namespace crate_kernels {

// Tokens per chunk, the unit of work and of partial sums. The size is fixed and does not depend on the number of
// threads, so the order of every sum is fixed too.
constexpr int64_t kTssaChunk = 64;

// A tensor (heads, tokens, channels) of one sequence; strides in elements. Elements have type T, or the call's dtype if
// T is char. Null data: the call has no such tensor.
template <class T>
struct TssaCpuTensor {
  T* data;
  int64_t head, token, channel;

  CRATE_ALWAYS_INLINE T* at(int64_t h, int64_t n) const { return data + h * head + n * token; }
  // One head of the tensor.
  CRATE_ALWAYS_INLINE TssaCpuTensor of_head(int64_t h) const { return {data + h * head, 0, token, channel}; }
};

// The sizes and numbers that every sequence of a call shares.
struct TssaCpuProblem {
  Dtype dtype;
  int nheads;
  int head_dim;
  const float* temp;  // per head
  bool dropout;
  float keep_factor;   // 1 / (1 - dropout_p)
  uint64_t keep_from;  // a value is kept iff its random word is at least this
  uint64_t seed;

  // Floats between the rows that kernels keep for each head: whole vectors of every level.
  CRATE_ALWAYS_INLINE int64_t width() const { return (head_dim + 15) / 16 * 16; }
  CRATE_ALWAYS_INLINE int64_t row_size() const { return nheads * width(); }
  // Floats that hold a number per head.
  CRATE_ALWAYS_INLINE int64_t head_size() const { return (nheads + 15) / 16 * 16; }
};

// One sequence. Null pointers: the call has no such tensor.
struct TssaSequence {
  int64_t seqlen;
  int64_t chunks;
  int64_t first_key;  // earlier tokens have no key to sum over; in the full form 0 or seqlen
  uint32_t counter;   // sequence * nheads, for dropout
  TssaCpuTensor<char> w, out, dout, dw;
  TssaCpuTensor<const uint8_t> key_mask;  // not 0: the token is a key. A byte of a bool tensor may be any number.
  TssaCpuTensor<float> membership;
  TssaCpuTensor<const float> dmembership;
  TssaCpuTensor<float> dlogit;
  float *energy, *moment;  // (nheads, head_dim) each, of the full form
  // The state of decoding, with (nheads,) of `state_mass`: read at the start, updated at the end.
  double *state_energy, *state_moment, *state_mass;
  double* dtemp;      // (nheads,): this sequence's share
  const float* bias;  // (nheads, bias_tokens); this sequence starts at its token `position`
  int64_t bias_tokens;
  int64_t position;
  float* work;
};

// A step of a kernel. Steps run one after another. A step over `chunks` may run them in any order or at once, unless it
// is `ascending` or `descending`: then each chunk needs the results of the chunk before it.
struct TssaKernelStep {
  void (*run)(const TssaCpuProblem&, const TssaSequence&, int64_t chunk, float* staging);
  enum Kind { whole, chunks, ascending, descending } kind;
};

// A kernel: its steps for one thread per sequence, its steps for several threads per sequence, the time of these on one
// thread as a multiple of the time of those, and the floats of `work` that it needs per sequence.
struct TssaKernel {
  const TssaKernelStep* alone;
  int alone_steps;
  const TssaKernelStep* shared;
  int shared_steps;
  int shared_cost;
  int64_t (*work_size)(const TssaCpuProblem&, int64_t chunks);
};

struct TssaKernels {
  TssaKernel forward, backward, causal_forward, causal_backward;
  int64_t (*staging_size)(const TssaCpuProblem&);  // floats per thread
};
extern const TssaKernels tssa_portable, tssa_avx2, tssa_avx512, tssa_avx512_bf16;

}  // namespace crate_kernels
