// The number per row that the backward needs: shift = delta - dlse, delta = sum_d dout out. mma_backward.cuh has the
// equations.
//
// With dropout, out is rounded as factor * w_j if one weight makes up its row. The backward subtracts delta from factor
// * dout_i.w_j, and s_ij multiplies the rounding error. So delta_i = sum_j P_ij R_ij dout_i.w_j is then summed from the
// products that it is subtracted from, by an online softmax, whose largest weight is exactly 1. So it is without, in
// blocks with a row where the rounding of out would show in dw: ../cpu/row_stats.h has the measure of it.
#pragma once

#include "mma_raise.cuh"
#include "mma_rows.cuh"
#include "rounding.cuh"

namespace crate_kernels::mssa {

constexpr int kShiftWarps = 4;
constexpr int kShiftBlocks = 8;  // a multiprocessor

// Writes shift of row i, if it exists.
CRATE_DEVICE void put_shift(const Problem& call, const Head& head, int i, float delta) {
  const int64_t at = head.row + i;
  if (i < head.length) call.scratch.delta[at] = call.inputs.dlse == nullptr ? delta : delta - call.inputs.dlse[at];
}

// A pair of a row's channels, as bits; zeros where there are none.
template <class T>
CRATE_DEVICE uint32_t channel_pair(const Problem& call, const Head& head, const View<const T>& from, int i,
                                   int channel) {
  const T* const at = from.data + i * from.row;
  uint32_t bits = 0;
  if (i >= head.length || channel >= call.access.head_dim) return bits;
  if (call.access.wide) {
    memcpy(&bits, __builtin_assume_aligned(at + channel, 4), sizeof bits);
  } else {
    bits = at[channel * from.channel].bits;
    if (channel + 1 < call.access.head_dim) bits |= static_cast<uint32_t>(at[(channel + 1) * from.channel].bits) << 16;
  }
  return bits;
}
template <class T>
CRATE_DEVICE float of_pair(uint32_t bits, int element) {
  return to_float(T{static_cast<uint16_t>(bits >> 16 * element)});
}

// Notes the norms of a warp's 16 rows from `first` on: mma_raise.cuh. A gradient of lse counts as a longer dout.
template <class T>
CRATE_DEVICE void put_norms(const Problem& call, const Head& head, int first) {
  const int lane = threadIdx.x % kWarp, row = first + lane / 4;
  const View<const T> w = head.view<const T>(call, call.inputs.w), dout = head.view<const T>(call, call.inputs.dout);
  // of the lane's two rows; of all it has seen
  float of_w[2] = {}, of_dout[2] = {}, max_w = 1.0f, max_dout = 0.0f, max_dlse = 0.0f;
#pragma unroll 1
  for (int c = 2 * (lane % 4); c < call.access.head_dim; c += 8) {
    unroll<2>([&](int half) {
      const uint32_t a = channel_pair(call, head, w, row + 8 * half, c);
      const uint32_t b = call.products ? channel_pair(call, head, dout, row + 8 * half, c) : 0;
      unroll<2>([&](int e) {
        of_w[half] += of_pair<T>(a, e) * of_pair<T>(a, e);
        of_dout[half] += of_pair<T>(b, e) * of_pair<T>(b, e);
      });
    });
  }
  unroll<2>([&](int half) {
    max_w = fmaxf(max_w, row_sum(of_w[half])), max_dout = fmaxf(max_dout, row_sum(of_dout[half]));
    if (call.inputs.dlse == nullptr || row + 8 * half >= head.length) return;
    max_dlse = fmaxf(max_dlse, fabsf(call.inputs.dlse[head.row + row + 8 * half]));
  });
  max_w = warp_max(max_w);  // at least 1: zeros would be infinitely shorter than dlse
  const float longer = sqrtf(warp_max(max_dout)) + 0.5f * warp_max(max_dlse) / sqrtf(max_w);
  if (lane == 0 && row < head.length) call.scratch.norms[head.row + row] = pack_pair<bf16>(longer * longer, max_w);
}

// A lane's share of two rows: what their roundings are found from.
struct Rounding {
  float squares[2] = {}, out[2] = {}, dout = 0.0f;  // by row of the two

  template <class T>
  CRATE_DEVICE void add(const uint32_t (&dout_bits)[4], const uint32_t (&out_bits)[4]) {
    unroll<4, 2>([&](int i, int e) {
      const float a = of_pair<T>(dout_bits[i], e), b = of_pair<T>(out_bits[i], e), product = a * b;
      squares[i % 2] += product * product;
      out[i % 2] = fmaxf(out[i % 2], fabsf(b));
      dout = fmaxf(dout, fabsf(a));
    });
  }
  // The roundings of the two rows, as multiples of what is allowed.
  CRATE_DEVICE void finish(float scale, float (&share)[2]) const {
    const float maximum = warp_max(dout);
    unroll<2>([&](int half) {
      const float reach = fabsf(scale) * row_max(out[half]) * sqrtf(row_sum(squares[half]));
      share[half] = reach > 0.0f ? reach / (kMaxRounding * maximum) : 0.0f;
    });
  }
};

// Writes shift of every row, and says of a lane's two rows how large their rounding is. A warp reads 16 rows of dout
// and of out once. With phi = "threshold", shift has no term with dout.
//
// The sum is the diagonal of a product, which adds in the backward's order: if a weight is near 1, out is near w, and
// dout.w - shift cancels.
template <class T>
CRATE_DEVICE void shift_rows(const Problem& call, float (&share)[2]) {
  const Head head(call, blockIdx.x / call.blocks);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, r = lane / 4, t = lane % 4;
  const int row = (blockIdx.x % call.blocks * kShiftWarps + warp) * 16 + r;
  float upper[4] = {}, lower[4] = {};  // rows and columns 0 to 7; 8 to 15
  if (call.products) {
    const View<const T> dout = head.view<const T>(call, call.inputs.dout);
    const View<const T> out = head.view<const T>(call, call.outputs.out);
    Rounding rounding;
    for (int c = 2 * t; c < call.access.head_dim + 2 * t; c += 16) {
      uint32_t a[4], b[4];  // (16, 16) per warp: 16 channels of dout and of out
      unroll<4>([&](int i) {
        a[i] = channel_pair(call, head, dout, row + i % 2 * 8, c + i / 2 * 8);
        b[i] = channel_pair(call, head, out, row + i % 2 * 8, c + i / 2 * 8);
      });
      rounding.add<T>(a, b);
      const uint32_t first[2] = {b[0], b[2]}, second[2] = {b[1], b[3]};
      mma_16816<T>(upper, a, first);
      mma_16816<T>(lower, a, second);
    }
    rounding.finish(call.scale, share);
  }
  if (t != r / 2) return;
  put_shift(call, head, row, r % 2 == 0 ? upper[0] : upper[1]);
  put_shift(call, head, row + 8, r % 2 == 0 ? lower[2] : lower[3]);
}

constexpr int kShiftColumns = 16;

// Writes shift of rows as sums over their weights, of a lane's two rows those that are wanted. A warp owns 16 rows of w
// and dout, and takes 16 keys per step.
template <class T, int DIM>
CRATE_DEVICE void summed_shift_rows(const Problem& call, const bool (&wanted)[2]) {
  constexpr int kRows = kShiftWarps * 16;
  const Head head(call, blockIdx.x / call.blocks);
  const int first = blockIdx.x % call.blocks * kRows;
  if (first >= head.length) return;
  T *const own_w = reinterpret_cast<T*>(shared_memory()), *const own_dout = own_w + kRows * DIM;  // (kRows, DIM) each
  T* const tile = own_dout + kRows * DIM;  // (kShiftColumns, DIM)
  const View<const T> w = head.view<const T>(call, call.inputs.w);
  const View<const T> dout = head.view<const T>(call, call.inputs.dout);
  const uint8_t* const key_mask = head.key_mask(call);
  const uint64_t seed = seed_of(call);
  const int warp_row = threadIdx.x / kWarp * 16, row = first + warp_row;
  const int lane = threadIdx.x % kWarp, r = lane / 4, t = lane % 4;
  load_tile<T, DIM>(own_w, w, kRows, first, head.length, call.access);
  load_tile<T, DIM>(own_dout, dout, kRows, first, head.length, call.access);
  float largest[2] = {-INFINITY, -INFINITY}, sum[2] = {}, delta[2] = {};  // (16,) per warp
  const Span walk = tiles_of(keys_of(call.mask, {first, first + kRows}, head.length), kShiftColumns);
  for (int n = walk.first; n < walk.stop; ++n) {
    const int key = n * kShiftColumns;
    __syncthreads();
    load_tile<T, DIM>(tile, w, kShiftColumns, key, head.length, call.access);
    finish_copies();
    if (row >= head.length) continue;
    float s[2][4] = {}, d[2][4] = {};  // (16, kShiftColumns) per warp: w_i.w_j, dout_i.w_j
#pragma unroll 2
    for (int k = 0; k < DIM / 16; ++k) {
      uint32_t a[4], b[2][2];  // (16, 16): 16 channels of own rows; of the tile's rows
      right_transposed<DIM>(b, tile, k);
      left<DIM>(a, own_w + warp_row * DIM, k);
      add_pair<T>(s[0], s[1], a, b);
      left<DIM>(a, own_dout + warp_row * DIM, k);
      add_pair<T>(d[0], d[1], a, b);
    }
    const uint32_t is_key = key_mask == nullptr ? ~0u : key_bits<kShiftColumns>(key_mask, key, head.length);
    const uint32_t kept =
        call.masking.seed == nullptr ? ~0u : kept_bits<kShiftColumns>(seed, call, head, row, key, false);
    unroll<2>([&](int half) {
      const int query = row + r + 8 * half;
      float score[4], maximum = -INFINITY;  // (kShiftColumns,) per quad
      unroll<4>([&](int i) {
        const int j = key + i / 2 * 8 + 2 * t + i % 2;
        const bool seen = (j < head.length) & sees(call.mask, query, j) & (is_key >> i);
        score[i] = seen ? __fmul_rn(s[i / 2][i % 2 + 2 * half], call.scale) : -INFINITY;
        maximum = fmaxf(maximum, score[i]);
      });
      const float before = largest[half], top = fmaxf(before, row_max(maximum)), base = top == -INFINITY ? 0.0f : top;
      const float shrink = weight(before, 1.0f, base);
      largest[half] = top;
      sum[half] *= shrink;
      delta[half] *= shrink;
      unroll<4>([&](int i) {
        const float p = weight(score[i], 1.0f, base);
        sum[half] += p;
        const bool there = kept >> (i / 2 * 4 + i % 2 + 2 * half) & 1;
        if (there) delta[half] += p * __fmul_rn(d[i / 2][i % 2 + 2 * half], call.keep_factor);
      });
    });
  }
  unroll<2>([&](int half) {
    const float total = row_sum(sum[half]), product = row_sum(delta[half]);
    if (t == 0 && wanted[half]) put_shift(call, head, row + r + 8 * half, total == 0.0f ? 0.0f : product / total);
  });
}

// Leaves the rows whose own weight is so nearly all that out is their token.
template <class T>
CRATE_DEVICE void leave_own(const Problem& call, const float (&share)[2], bool (&wanted)[2]) {
  const Head head(call, blockIdx.x / call.blocks);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, r = lane / 4, t = lane % 4;
  const int row = (blockIdx.x % call.blocks * kShiftWarps + warp) * 16 + r;
  const View<const T> w = head.view<const T>(call, call.inputs.w);
  constexpr float kEps = std::is_same_v<T, bf16> ? 0x1p-7f : 0x1p-10f;
  unroll<2>([&](int half) {
    float square = 0.0f;
    for (int c = 2 * t; c < call.access.head_dim; c += 8) {
      const uint32_t bits = channel_pair(call, head, w, row + 8 * half, c);
      unroll<2>([&](int e) { square += of_pair<T>(bits, e) * of_pair<T>(bits, e); });
    }
    const float score = call.scale * row_sum(square);
    const float lse = row + 8 * half < head.length ? call.outputs.lse[head.row + row + 8 * half] : 0.0f;
    const float rest = fmaxf(lse - score, 0.0f) + 0x1p-23f * fabsf(lse);
    wanted[half] = wanted[half] && 2.0f * rest * share[half] > kDeviation * kEps;
  });
}

template <class T, int DIM>
CRATE_DEVICE void shift_block(const Problem& call) {
  if constexpr (kRaises<T>) {
    const int first = (blockIdx.x % call.blocks * kShiftWarps + threadIdx.x / kWarp) * 16;
    if (call.scratch.norms != nullptr) put_norms<T>(call, Head(call, blockIdx.x / call.blocks), first);
  }
  bool wanted[2] = {true, true};
  if (call.masking.seed == nullptr || !call.products) {
    float share[2] = {};  // of the lane's two rows
    shift_rows<T>(call, share);
    unroll<2>([&](int half) { wanted[half] = share[half] > 1.0f; });
    if (__syncthreads_count(wanted[0] || wanted[1]) == 0) return;
    if (call.masking.key_padding_mask == nullptr) leave_own<T>(call, share, wanted);
    if (__syncthreads_count(wanted[0] || wanted[1]) == 0) return;
  }
  summed_shift_rows<T, DIM>(call, wanted);
}

template <class T, int DIM>
__global__ void __launch_bounds__(kShiftWarps * 32, kShiftBlocks) mma_shift_kernel(Problem call) {
  if constexpr (kTensorCores) {
    shift_block<T, DIM>(call);
  } else {
    __trap();
  }
}

}  // namespace crate_kernels::mssa
