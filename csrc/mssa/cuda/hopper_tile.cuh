// Tiles of tokens for the kernels of sm_90a, and the steps between their products.
//
// A tile has rows of 64 channels, 128 bytes with their swizzle, in panels one after another: DIM channels are
// ceil(DIM / 64) panels. K-major, the inner index of a product is a channel; MN-major, a token.
#pragma once

#include "../../common/cuda/hopper.cuh"

namespace crate_kernels::mssa {

constexpr uint32_t kRowBytes = 128;

// Byte of a 16-byte chunk of a row.
CRATE_DEVICE uint32_t chunk_at(int row, int chunk) {
  return row * kRowBytes + ((chunk ^ (row & 7)) << 4);
}

// s (+)= a b^T of 64 rows a at `left` and COLUMNS rows b at `right`, over DIM channels; panels are so many bytes apart.
template <class T, int COLUMNS, int DIM>
CRATE_DEVICE void add_scores(float (&s)[COLUMNS / 2], uint32_t left, uint32_t right, uint32_t left_panel,
                             uint32_t right_panel, bool adds) {
#pragma unroll
  for (int kk = 0; kk < DIM / 16; ++kk) {
    const uint32_t step = kk % 4 * 32;
    const uint64_t a = matrix_descriptor(left + kk / 4 * left_panel, 0, 1024);
    const uint64_t b = matrix_descriptor(right + kk / 4 * right_panel, 0, 1024);
    Wgmma<T, COLUMNS>::template ss<false, false>(s, advance(a, step), advance(b, step), adds || kk > 0);
  }
}
template <class T, int COLUMNS, int DIM>
CRATE_DEVICE void add_scores(float (&s)[COLUMNS / 2], uint32_t left, uint32_t right, uint32_t panel, bool adds) {
  add_scores<T, COLUMNS, DIM>(s, left, right, panel, panel, adds);
}

// acc (+)= p of 16 TERMS tokens, from registers, times those tokens at `tile`.
template <class T, int DIM, int TERMS, int CAPACITY>
CRATE_DEVICE void add_tokens(float (&acc)[DIM / 2], const uint32_t (&p)[CAPACITY][4], uint32_t tile, uint32_t panel,
                             bool adds) {
  static_assert(TERMS <= CAPACITY);
#pragma unroll
  for (int kk = 0; kk < TERMS; ++kk) {
    Wgmma<T, DIM>::template rs<true>(acc, p[kk], advance(matrix_descriptor(tile, panel, 1024), 2048 * kk),
                                     adds || kk > 0);
  }
}

// Sums of COLUMNS columns, rounded, as the left operand of a product.
template <class T, int COLUMNS, int CAPACITY>
CRATE_DEVICE void pack_sums(uint32_t (&p)[CAPACITY][4], const float (&s)[COLUMNS / 2]) {
  static_assert(COLUMNS / 16 <= CAPACITY);
#pragma unroll
  for (int kk = 0; kk < COLUMNS / 16; ++kk) {
#pragma unroll
    for (int m = 0; m < 4; ++m) p[kk][m] = pack_pair<T>(s[8 * kk + 2 * m], s[8 * kk + 2 * m + 1]);
  }
}

// Writes a warp's sums of 16 rows to `rows`, rounded, for store_rows: of a thread's two rows, one is multiplied by
// `upper`, the other by `lower`.
template <class T, int DIM>
CRATE_DEVICE void stage_rows(uint32_t rows, const float (&acc)[DIM / 2], float upper, float lower, int lane) {
  const int row = lane & 15, more = lane >> 4;
#pragma unroll
  for (int kk = 0; kk < DIM / 16; ++kk) {
    const float* const o = &acc[8 * kk];
    store_matrices(rows + kk / 4 * 16 * kRowBytes + chunk_at(row, 2 * (kk % 4) + more),
                   pack_pair<T>(o[0] * upper, o[1] * upper), pack_pair<T>(o[2] * lower, o[3] * lower),
                   pack_pair<T>(o[4] * upper, o[5] * upper), pack_pair<T>(o[6] * lower, o[7] * lower));
  }
}

// Columns beyond the whole blocks of 64, kept by their rows: pitch bytes a row, in the swizzle of that size.
template <int COLUMNS>
struct Columns {
  static constexpr int kPitch = COLUMNS <= 16 ? 32 : COLUMNS <= 32 ? 64 : 128;
  static constexpr Swizzle kSwizzle = COLUMNS <= 16 ? Swizzle::k32 : COLUMNS <= 32 ? Swizzle::k64 : Swizzle::k128;

  static CRATE_DEVICE uint32_t at(int row, int chunk) {
    const uint32_t address = row * kPitch + chunk * 16;
    return address ^ (address >> 7 & (kPitch / 16 - 1)) << 4;
  }
  // 16 columns from `first` on, of a warp's 16 rows from `row` on.
  static CRATE_DEVICE void put(uint32_t to, const uint32_t (&p)[4], int row, int first, int lane) {
    store_matrices(to + at(row + (lane & 15), first / 8 + (lane >> 4)), p[0], p[1], p[2], p[3]);
  }
  // The right operand of 16 rows: the inner index is a row.
  static CRATE_DEVICE uint64_t descriptor(uint32_t columns, int rows) {
    return advance(matrix_descriptor<kSwizzle>(columns, 0, 8 * kPitch), rows * kPitch);
  }
};

}  // namespace crate_kernels::mssa
