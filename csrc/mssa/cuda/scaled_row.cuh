// A row of g becomes one of g^ = g / r, for the symmetric backward: head_gradient.cuh has the equations.
#pragma once

#include "head_tokens.cuh"
#include "rounding.cuh"

namespace crate_kernels::mssa {

// What 8 lanes, the chunks of a row, find of it.
template <class T>
struct ScaledRow {
  float delta = 0.0f;  // g^ . out, of the rounded g^
  float squares = 0.0f, own = 0.0f, max_out = 0.0f, max_g = 0.0f;

  // Returns g^ of 8 channels.
  CRATE_DEVICE uint4 add(uint4 g, const uint4& out, const uint4& w, float inverse) {
    uint32_t* const pairs[4] = {&g.x, &g.y, &g.z, &g.w};
    const uint32_t of_out[4] = {out.x, out.y, out.z, out.w}, of_w[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = unpack_pair<T>(of_w[i]);
      own += x.x * x.x + x.y * x.y;
      const float2 before = unpack_pair<T>(*pairs[i]), o = unpack_pair<T>(of_out[i]);
      *pairs[i] = pack_pair<T>(before.x * inverse, before.y * inverse);
      const float2 after = unpack_pair<T>(*pairs[i]);
      delta += after.x * o.x + after.y * o.y;
      squares += before.x * o.x * (before.x * o.x) + before.y * o.y * (before.y * o.y);
      max_out = fmaxf(max_out, fmaxf(fabsf(o.x), fabsf(o.y)));
      max_g = fmaxf(max_g, fmaxf(fabsf(before.x), fabsf(before.y)));
    }
    return g;
  }
  // By all lanes of a warp, which have four rows.
  CRATE_DEVICE void finish() {
#pragma unroll
    for (int step = 1; step < 8; step *= 2) {
      delta += __shfl_xor_sync(kAllLanes, delta, step);
      squares += __shfl_xor_sync(kAllLanes, squares, step);
      own += __shfl_xor_sync(kAllLanes, own, step);
      max_out = fmaxf(max_out, __shfl_xor_sync(kAllLanes, max_out, step));
    }
    max_g = warp_max(max_g);
  }
  // Returns whether the rounding of out would show in dw: mma_shift.cuh has the measure of it. A row whose own weight
  // is nearly all has its token as out, with nothing rounded.
  CRATE_DEVICE bool shows(float scale, float lse, bool is_key) const {
    constexpr float kEps = BackwardRange<T>::kHalf ? 0x1p-10f : 0x1p-7f;
    const float reach = fabsf(scale) * max_out * sqrtf(squares), maximum = kMaxRounding * max_g;
    if (!(reach > maximum)) return false;
    const float rest = fmaxf(lse - scale * own, 0.0f) + 0x1p-23f * fabsf(lse);
    return !is_key || 2.0f * rest * reach > kDeviation * kEps * maximum;
  }
};

}  // namespace crate_kernels::mssa
