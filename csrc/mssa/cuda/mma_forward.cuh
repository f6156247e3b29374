// The forward of subspace attention on tensor cores: a block walks over tiles of keys, and copies the next tile while
// it uses the current one. mma_rows.cuh has the terms of one tile.
#pragma once

#include "mma_rows.cuh"

namespace crate_kernels::mssa {

// Stores the rows of its head from `from` on.
template <class T, int DIM, int ROWS16, int COLUMNS, bool IN_REGISTERS>
CRATE_DEVICE void forward_block(const Problem& call, int from = 0) {
  const int rows = static_cast<int>(blockDim.x) / 2 * ROWS16;
  const Head head(call, blockIdx.x / call.blocks);
  const int block = blockIdx.x % call.blocks;
  if (call.scratch.select_level == nullptr) clear_uncovered(call, head, block, call.outputs.out, call.outputs.lse);
  const int first = first_row(call, block, rows);
  if (first >= head.length || first + rows <= from) return;
  T* const own_tile = reinterpret_cast<T*>(shared_memory());  // (rows, DIM)
  T* const tiles = own_tile + rows * DIM;                     // two of (COLUMNS, DIM)
  const View<const T> w = head.view<const T>(call, call.inputs.w);
  const View<const T> key_rows = head.view<const T>(call, call.inputs.keys);
  const Keys keys(call, head);
  const int warp_rows = threadIdx.x / kWarp * 16 * ROWS16, row = first + warp_rows, place = keys.before + row;
  const Span own_rows = {place, place + 16 * ROWS16};
  const Span walk =
      tiles_of(keys_of(call.mask, {keys.before + first, keys.before + first + rows}, keys.length), COLUMNS);
  const RowMask mask = {keys.key_mask, seed_of(call), call.scale == 0.0f ? 1.0f : fabsf(call.scale), keys.length};
  const Sign sign(call.scale);
  const auto load = [&](int n) {
    load_tile<T, DIM>(tiles + n % 2 * COLUMNS * DIM, key_rows, COLUMNS, n * COLUMNS, keys.length, call.access);
  };
  const auto load_first = [&] {
    load(walk.first);
    finish_copies();
  };
  load_tile<T, DIM>(own_tile, w, rows, first, head.length, call.access);
  load_first();
  Own<T, DIM, ROWS16, IN_REGISTERS> own;
  own.load(own_tile + warp_rows * DIM);
  RowState<T, DIM, ROWS16> state;
  Pass pass = call.select ? Pass::statistics : Pass::online;
  while (true) {
    for (int n = walk.first; n < walk.stop; ++n) {
      if (n + 1 < walk.stop) load(n + 1);
      const Span tile = {n * COLUMNS, n * COLUMNS + COLUMNS};
      if (row < head.length && meets(call.mask, own_rows, tile)) {
        const bool masked = keys.key_mask != nullptr || tile.stop > keys.length || cuts(call.mask, own_rows, tile);
        attend_tile<COLUMNS>(state, own, tiles + n % 2 * COLUMNS * DIM, call, head, mask, sign, {place, tile.first},
                             masked, pass);
      }
      finish_copies();
    }
    if (pass != Pass::select) state.finish_sums();
    if (pass != Pass::statistics) break;
    if (call.scratch.select_level != nullptr) return put_statistics(state, call, head, row);
    pass = Pass::select;
    load_first();
  }
  if (row < head.length) finish_rows<T, DIM, ROWS16>(state, own_tile + warp_rows * DIM, call, head, row, from);
}

// At most four warps per block.
template <class T, int DIM, int ROWS16, int COLUMNS, bool IN_REGISTERS>
__global__ void __launch_bounds__(128) mma_forward_kernel(Problem call) {
  if constexpr (kTensorCores) {
    forward_block<T, DIM, ROWS16, COLUMNS, IN_REGISTERS>(call);
  } else {
    __trap();
  }
}

}  // namespace crate_kernels::mssa
