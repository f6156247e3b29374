// The forward of subspace attention on tensor cores: a block walks over tiles of keys, and copies the next tile while
// it uses the current one. mma_rows.cuh has the terms of one tile.
#pragma once

#include "mma_rows.cuh"
#include "space.cuh"

namespace crate_kernels::mssa {

template <class T, int DIM, int ROWS16, int COLUMNS, bool HELD>
CRATE_DEVICE void forward_block(const Problem& call) {
  const int rows = static_cast<int>(blockDim.x) / 2 * ROWS16;
  const Head head(call, blockIdx.x / call.blocks);
  const int block = blockIdx.x % call.blocks;
  clear_uncovered<T>(call, head, block, call.out, call.lse);
  // Start the longest causal rows first: if they started last, the launch would wait for them.
  const int first = (call.causal ? call.blocks - 1 - block : block) * rows;
  if (first >= head.length) return;
  T* const own_tile = reinterpret_cast<T*>(shared_memory());
  T* const tiles = own_tile + rows * DIM;  // two of them
  const View<const T> w = head.view<const T>(call, call.w);
  const View<const T> keys = head.view<const T>(call, call.keys);
  int before = 0, length = head.length;  // keys before the rows, and all keys
  if (call.held != nullptr) {
    const CacheSpace space = space_of(call.held[head.sequence], call.keep, head.sequence, call.seqlen, call.capacity);
    before = space.held;
    length = space.held + space.appended;
  }
  const int stop = call.causal ? min(before + first + rows, length) : length;
  const int count = (stop + COLUMNS - 1) / COLUMNS;
  const int warp_rows = threadIdx.x / kWarp * 16 * ROWS16, row = first + warp_rows, place = before + row;
  const bool padded = call.keep != nullptr && call.held == nullptr;
  const RowMask mask = {padded ? call.keep + static_cast<int64_t>(head.sequence) * call.seqlen : nullptr,
                        call.seed == nullptr ? 0 : static_cast<uint64_t>(*call.seed),
                        call.scale == 0.0f ? 1.0f : fabsf(call.scale), length};
  const Sign sign(call.scale);
  const auto load_first = [&] {
    load_tile<T, DIM>(tiles, keys, COLUMNS, 0, length, call.access);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
  };
  load_tile<T, DIM>(own_tile, w, rows, first, head.length, call.access);
  load_first();
  Own<T, DIM, ROWS16, HELD> own;
  own.load(own_tile + warp_rows * DIM);
  RowState<T, DIM, ROWS16> state;
  Pass pass = call.select ? Pass::statistics : Pass::online;
  while (true) {
    for (int n = 0; n < count; ++n) {
      const int key = n * COLUMNS;
      if (n + 1 < count) {
        T* const next = tiles + (n + 1) % 2 * COLUMNS * DIM;
        load_tile<T, DIM>(next, keys, COLUMNS, key + COLUMNS, length, call.access);
      }
      cp_async_commit();
      if (row < head.length && !(call.causal && key >= place + 16 * ROWS16)) {
        const bool masked = padded || key + COLUMNS > length || (call.causal && key + COLUMNS - 1 > place);
        attend_tile<COLUMNS>(state, own, tiles + n % 2 * COLUMNS * DIM, call, head, mask, sign, {place, key}, masked,
                             pass);
      }
      cp_async_wait<0>();
      __syncthreads();
    }
    if (pass != Pass::select) state.finish_sums();
    if (pass != Pass::statistics) break;
    pass = Pass::select;
    load_first();
  }
  if (row < head.length) finish_rows<T, DIM, ROWS16>(state, own_tile + warp_rows * DIM, call, head, row);
}

// At most four warps per block.
template <class T, int DIM, int ROWS16, int COLUMNS, bool HELD>
__global__ void __launch_bounds__(128) mma_forward_kernel(Problem call) {
  if constexpr (kTensorCores) {
    forward_block<T, DIM, ROWS16, COLUMNS, HELD>(call);
  } else {
    __trap();
  }
}

}  // namespace crate_kernels::mssa
