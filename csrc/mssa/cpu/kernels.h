// The kernels that each instruction-set unit offers to mssa_cpu.cpp: plain structs and function pointers only.
#pragma once

#include <stdint.h>

#include "../../common/cpu/arena.h"
#include "../../common/dtype.h"
#include "../mask.h"

namespace crate_kernels {

// A (tokens, head_dim) matrix of one head; strides in elements.
struct MssaView {
  void* data;
  int64_t token_stride;
  int64_t dim_stride;
};

static inline char* element(const MssaView& view, int64_t token, Dtype dtype) {
  return static_cast<char*>(view.data) + token * view.token_stride * itemsize(dtype);
}

// The numbers that every head of a call shares.
struct MssaProblem {
  Dtype dtype;
  Dtype result;  // of out and dw
  int head_dim;
  double scale;
  mssa::Mask mask;
  bool dropout;
  bool threshold;  // phi = "threshold": probabilities above `level` become `level`, others 0
  float level;
  float keep_factor;   // 1 / (1 - dropout_p)
  bool range;          // of tokens of a longer sequence: its backward gets delta passed
  uint64_t keep_from;  // a weight is kept iff its random word is at least this
  uint64_t seed;
};

// Tokens of one head that are queries, and tokens that are keys. Of a whole sequence, or of any range with itself, they
// are the same: then w and keys are one view.
struct MssaHead {
  int64_t seqlen;                  // queries
  int64_t nkeys;                   // tokens that may be keys
  bool itself;                     // the queries are the keys
  int64_t query_start, key_start;  // places of the first in the sequence
  uint32_t counter;                // batch * nheads + head, for dropout
  MssaView w, out, dout, dw;
  MssaView keys;
  const uint8_t* key_mask;  // not 0: the token is a key; null: all are. A byte of a bool tensor may be any number.
  float* lse;
  const float* dlse;     // null: no gradient
  const float* delta;    // of the queries; null: to be computed from out. If not null, lse is over more keys.
  const MssaHead* next;  // the head that this thread is likely to take next; null: none
};

// Gradients of a part: of tokens as keys, by key, and as queries, by token. Null: not wanted.
struct MssaShares {
  float *as_key, *as_query;
};

// New tokens of one head against its cached ones: the i-th new token sees the first `visible[i]`.
struct MssaDecode {
  MssaView w, keys, out;
  int64_t new_tokens;
  const int32_t* visible;
  float* lse;        // null: not wanted
  float* partial;    // if a cache is read in parts: mssa_decode_size floats per part and new token
  int64_t per_part;  // cached tokens per part
};

struct MssaKernels {
  // Compute part `part` of `parts` of the rows of out and lse.
  void (*forward)(const MssaProblem&, const MssaHead&, int part, int parts, Arena&);
  // With parts == 1 writes dw. Otherwise adds this part's share to partial + part * mssa_partial_size.
  void (*backward)(const MssaProblem&, const MssaHead&, int part, int parts, Arena&, float* partial);
  // Sum the shares of keys [begin, end) and write dw.
  void (*combine)(const MssaProblem&, const MssaHead&, int parts, const float* partial, int64_t begin, int64_t end);
  // Write delta of the queries, only from their dout and out.
  void (*rectangular_delta)(const MssaProblem&, const MssaHead&, Arena&, float* delta);
  // Add to `partial` the share of dw that a part of the pairs of rows and columns has. In `rows` the rows are queries
  // and the columns keys, in `columns` the other way round.
  void (*rectangular_backward)(const MssaProblem&, const MssaHead& rows, const MssaHead& columns, int part, int parts,
                               Arena&, float* partial);
  // Write out and lse; with parts > 1, write the result of part `part` of the cache to `partial`.
  void (*decode)(const MssaProblem&, const MssaDecode&, int part, int parts);
  // Sum the parts, in their order, and write out and lse.
  void (*decode_combine)(const MssaProblem&, const MssaDecode&, int parts);
};

// One table per level; null where a level adds nothing for that element type.
struct MssaTables {
  const MssaKernels* f32;   // any dtype, converted to fp32
  const MssaKernels* bf16;  // bf16 products; softmax without dropout only
};
extern const MssaTables mssa_portable, mssa_avx2, mssa_avx512, mssa_avx512_bf16, mssa_amx;

// Floats that one part of a cache leaves for one new token: out before the division, largest score, sum.
static inline int64_t mssa_decode_size(int head_dim) {
  return (head_dim + 15) / 16 * 16 + 16;  // whole lines of the cache
}

// Floats that one part of one head accumulates: rows as keys, then rows as queries.
static inline int64_t mssa_partial_size(int64_t seqlen, int head_dim) {
  const int64_t width = (head_dim + 15) / 16 * 16;  // of the widest vectors
  return 2 * ((seqlen + 63) / 64 * 64) * width;
}

}  // namespace crate_kernels
