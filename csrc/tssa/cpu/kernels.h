// The kernels that each instruction-set unit offers to tssa_cpu.cpp: plain structs and function pointers only.
#pragma once

#include <stdint.h>

#include "../../common/dtype.h"

// Units of different levels call these: a copy that the linker shares would run on the wrong machine.
#define CRATE_ALWAYS_INLINE inline __attribute__((always_inline))

namespace crate_kernels {

// Tokens per chunk, the unit of work and of partial sums. It depends on nothing, least of all on the number of threads:
// sums are added in the same order whoever computes them.
constexpr int64_t kTssaChunk = 64;

// A tensor (heads, tokens, channels) of one sequence; strides in elements. Its elements are of type T, or, where T is
// char, of the dtype of the call. Null data: the call has no such tensor.
template <class T>
struct TssaStrided {
  T* data;
  int64_t head, token, channel;

  CRATE_ALWAYS_INLINE T* at(int64_t h, int64_t n) const { return data + h * head + n * token; }
  // One head of it.
  CRATE_ALWAYS_INLINE TssaStrided of_head(int64_t h) const { return {data + h * head, 0, token, channel}; }
};

// The sizes and numbers that every sequence of a call shares.
struct TssaProblem {
  Dtype dtype;
  int nheads;
  int head_dim;
  const float* temp;  // of each head
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
  int64_t first_key;  // before it there is nothing to sum over; in the full form 0 or seqlen
  uint32_t counter;   // sequence * nheads, for dropout
  TssaStrided<char> w, out, dout, dw;
  TssaStrided<const bool> keep;  // which tokens enter the sums
  TssaStrided<float> membership;
  TssaStrided<const float> dmembership;
  TssaStrided<float> dlogit;
  float *energy, *moment;  // (nheads, head_dim) each
  float* dtemp;            // (nheads,): this sequence's share
  const float* bias;       // (nheads, bias_tokens); the first token here is its token `position`
  int64_t bias_tokens;
  int64_t position;
  // Where decoding starts, and where it leaves off: (nheads, head_dim), (nheads, head_dim), (nheads,).
  float *state_energy, *state_moment, *state_mass;
  float* work;
};

// A step of a kernel. Steps follow one another. One over `chunks` may run them in any order or at once; where it is
// `ascending` or `descending`, a chunk needs what the one before it left.
struct TssaStep {
  void (*run)(const TssaProblem&, const TssaSequence&, int64_t chunk, float* staging);
  enum Kind { whole, chunks, ascending, descending } kind;
};

// A kernel: its steps where one thread has the sequence, its steps where several share it, and the floats of
// `work` that it needs for a sequence.
struct TssaKernel {
  const TssaStep* alone;
  int alone_steps;
  const TssaStep* shared;
  int shared_steps;
  int64_t (*work_size)(const TssaProblem&, int64_t chunks);
};

struct TssaKernels {
  TssaKernel forward, backward, causal_forward, causal_backward;
  int64_t (*staging_size)(const TssaProblem&);  // floats, for each thread
};
extern const TssaKernels tssa_portable, tssa_avx2, tssa_avx512;

}  // namespace crate_kernels
