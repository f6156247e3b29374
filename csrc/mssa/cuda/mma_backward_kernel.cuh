// The walk of the backward over tiles of rows; mma_backward.cuh has the terms of one tile.
#pragma once

#include "mma_backward.cuh"

namespace crate_kernels::mssa {

// Adds all tiles of COLUMNS rows. Two tiles are in shared memory: one is copied while the other is used.
template <int COLUMNS, class T, int DIM, int ROWS16, bool IN_REGISTERS>
CRATE_DEVICE void walk(Gradient<T, DIM, ROWS16, IN_REGISTERS>& gradient, unsigned char* stages, const Problem& call,
                       const Head& head, const View<const T>& w, const View<const T>& dout, const uint8_t* mask,
                       Span block, int row, Terms terms) {
  const uint64_t seed = seed_of(call);
  const Span tiles = tiles_of(partners_of(call.mask, block, head.length, terms.scores), COLUMNS);
  const Span own = {row, row + 16 * ROWS16};
  const auto stage = [&](int n) { return row_tile_at<T, DIM>(stages + n % 2 * row_tile_bytes<DIM>(COLUMNS), COLUMNS); };
  load_row_tile<T, DIM>(stage(tiles.first), call, head, w, dout, terms.select, tiles.first * COLUMNS, COLUMNS);
  finish_copies();
  for (int n = tiles.first; n < tiles.stop; ++n) {
    if (n + 1 < tiles.stop)
      load_row_tile<T, DIM>(stage(n + 1), call, head, w, dout, terms.select, (n + 1) * COLUMNS, COLUMNS);
    if (row < head.length) {
      const RowTile<T> tile = stage(n);
#pragma unroll 1
      for (int part = 0; part < COLUMNS; part += 16) {
        const int other = n * COLUMNS + part;
        if (other >= head.length) break;
        const Span tile_rows = {other, other + 16};
        Roles roles = {meets(call.mask, tile_rows, own), terms.scores && meets(call.mask, own, tile_rows),
                       mask != nullptr || tile_rows.stop > head.length};
        roles.masked |=
            (roles.key && cuts(call.mask, tile_rows, own)) || (roles.query && cuts(call.mask, own, tile_rows));
        if (!roles.key && !roles.query) continue;
        const RowTile<T> rows = {tile.w + part * DIM, tile.dout + part * DIM, tile.lse + part, tile.shift + part};
        gradient.add_rows(call, head, mask, seed, rows, row, other, terms, roles);
      }
    }
    finish_copies();
  }
}

template <class T, int DIM, int ROWS16, int COLUMNS, bool IN_REGISTERS>
CRATE_DEVICE void backward_block(const Problem& call) {
  const int rows = static_cast<int>(blockDim.x) / 2 * ROWS16;
  const Head head(call, blockIdx.x / call.blocks);
  const int block = blockIdx.x % call.blocks;
  clear_uncovered(call, head, block, call.outputs.dw, nullptr);
  const int first = block * rows;
  if (first >= head.length) return;
  T *const own_w = reinterpret_cast<T*>(shared_memory()), *const own_dout = own_w + rows * DIM;  // (rows, DIM) each
  unsigned char* const stages = reinterpret_cast<unsigned char*>(own_dout + rows * DIM);
  const View<const T> w = head.view<const T>(call, call.inputs.w);
  const View<const T> dout = head.view<const T>(call, call.inputs.dout);
  const uint8_t* const mask = head.key_mask(call);
  // Derived again: read from `call`, they cost 9 registers on sm_80 in heads of 256 channels.
  const bool values = call.values, products = values && !call.select;
  const bool scores = products || call.inputs.dlse != nullptr;
  load_tile<T, DIM>(own_w, w, rows, first, head.length, call.access);
  if (products) load_tile<T, DIM>(own_dout, dout, rows, first, head.length, call.access);
  if constexpr (kRaises<T>) find_raise(call, head);
  finish_copies();
  const int warp_rows = threadIdx.x / kWarp * 16 * ROWS16, row = first + warp_rows;
  Gradient<T, DIM, ROWS16, IN_REGISTERS> gradient;
  gradient.w.load(own_w + warp_rows * DIM);
  gradient.dout.load(own_dout + warp_rows * DIM);
  unroll<ROWS16, 2>([&](int m, int half) {
    // Rows past the end are zeros in the tile, and their results are not stored: any index in range will do here.
    const int j = min(row + 16 * m + static_cast<int>(threadIdx.x) % 32 / 4 + 8 * half, head.length - 1);
    gradient.base[m][half] = base_of(call.outputs.lse[head.row + j]);
    gradient.shift[m][half] = call.scratch.delta[head.row + j];
    if (mask != nullptr && !mask[j]) gradient.is_key &= ~(1u << (2 * m + half));
  });
  // A threshold used as a weight would be rounded. As a factor of a sum it is exact. So sum the selected rows first,
  // apart from the other terms.
  const bool apart = call.select && values;
  Terms terms = {values, scores && !apart, products, apart};
  while (true) {
    walk<COLUMNS>(gradient, stages, call, head, w, dout, mask, {first, first + rows}, row, terms);
    if (!terms.select) break;
    gradient.multiply(call.threshold);
    if (!scores) break;
    terms = {false, true, false, false};
  }
  if (row >= head.length) return;
  const float back = kRaises<T> ? 1.0f / raise() : 1.0f;
  unroll<ROWS16>([&](int m) { round_rows<T, DIM>(own_w + (warp_rows + m * 16) * DIM, gradient.acc[m], back, back); });
  __syncwarp();
  store_tile<T, DIM>(head.view<T>(call, call.outputs.dw), own_w + warp_rows * DIM, 16 * ROWS16, row, head.length,
                     call.access);
}

// At most four warps per block.
template <class T, int DIM, int ROWS16, int COLUMNS, bool IN_REGISTERS>
__global__ void __launch_bounds__(128) mma_backward_kernel(Problem call) {
  if constexpr (kTensorCores) {
    backward_block<T, DIM, ROWS16, COLUMNS, IN_REGISTERS>(call);
  } else {
    __trap();
  }
}

}  // namespace crate_kernels::mssa
