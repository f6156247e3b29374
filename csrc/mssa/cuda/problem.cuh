// Arguments of the forward and backward kernels, on tensor cores or not: crate_kernels/ops/mssa/cuda/problem.py.
#pragma once

#include <cstdint>

#include "../../common/dtype.h"
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

// Another range of the rows' sequence, which they meet instead of themselves. Places count from the sequence's start.
struct Range {
  Rows dout;                        // gradient of its out
  const float *lse, *delta, *dlse;  // (sequences, nheads, count)
  const uint8_t* key_padding_mask;  // (sequences, count); null: every token is a key
  int count, start;                 // its tokens, and the place of the first
  int row_start;                    // place of the first row
  int first_head, nheads;           // heads before those that are here, and all heads: dropout counts them
};

// The tensors of a call, in four parts. A number per row is (sequences, nheads, seqlen), packed (nheads, total).

struct Inputs {
  Rows w, keys, dout;  // keys: w, or the cache that w was appended to; dout: gradient of out
  const float* dlse;   // a number per row; null: no gradient
};

// A backward reads those of the forward, and writes dw.
struct Outputs {
  Rows out, dw;
  float* lse;  // a number per row; null: not wanted
};

// A number per row each.
struct RowScratch {
  float* delta;
  float* lse_residual;            // what rounding took from lse; null: not known
  float *row_max, *select_level;  // of phi = "threshold": the largest score, and the threshold times the sum of weights
                                  // that are at most 1. Where they are wanted, a forward writes nothing else
  uint32_t* norms;                // of every 16 rows, at the first: mma_raise.cuh; null: not wanted
};

// What says which keys a row sees, and which weights dropout keeps.
struct Masking {
  const uint8_t* key_padding_mask;  // (sequences, seqlen); null: every key
  int32_t* cache_lengths;           // of the cache before the new tokens, which alone are padded then; null: no cache
  const int64_t* seed;              // null: no dropout
};

struct Problem {
  Inputs inputs;
  Outputs outputs;
  RowScratch scratch;
  Masking masking;
  const int32_t* cu_seqlens;             // (sequences + 1,); null: not packed
  int sequences, nheads, seqlen, total;  // seqlen: the longest; total: packed rows
  int capacity;                          // of the cache
  int blocks, groups;                    // per head: of rows, and of channels of the output
  Access access;
  Dtype dtype;
  float scale, threshold, keep_factor;
  uint32_t drop_last;  // the largest Philox word that is dropped
  Mask mask;
  bool select;                    // phi = "threshold"
  bool values, products, scores;  // backward: has terms with dout_i, with dout_i.w_j, with a gradient of scores
  Dtype out_dtype;                // of out and dw
  Range key_range;                // the range whose tokens are `keys`, if it is not the rows'
};

}  // namespace crate_kernels::mssa
