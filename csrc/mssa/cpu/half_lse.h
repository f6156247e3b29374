// Halves of lse in place of half norms, for pairs of a backward: E_ij = sqrt(P_ij P_ji) is at most 1 whatever the norms
// and the sign of scale (docs/derivations.md).
#pragma once

#include "row_stats.h"

namespace {

// Makes lse_j / 2 the half norm of each key j, unless an lse is too large, or too far from another. Not in fp32, where
// the row form has three quarters of the error. False: nothing is changed.
template <class T>
bool halve_lse(HeadTiles<T>& tiles) {
  if (tiles.p.dtype == Dtype::f32) return false;
  const KeyList& keys = tiles.keys;
  const auto half = [&](int key) { return 0.5f * static_cast<float>(kLog2e) * tiles.head.lse[keys.token[key]]; };
  float minimum = INFINITY, maximum = -INFINITY;
  for (int k = 0; k < keys.count; ++k) {
    if (!(fabsf(tiles.head.lse[keys.token[k]]) <= trusted_lse(tiles.p.dtype))) return false;
    minimum = fminf(minimum, half(k));
    maximum = fmaxf(maximum, half(k));
  }
  if (maximum - minimum > kSafeSpread || fmaxf(maximum, -minimum) > kSafeHeight) return false;
  for (int k = 0; k < keys.count; ++k) tiles.half_norms[k] = whole_bits(half(k));
  // Scores of padding are 0, and its weights must be finite, too: an lse may be far below 0.
  const float padding = fmaxf(0.0f, -whole_bits(minimum));
  for (int k = keys.count; k < keys.blocks * kTile; ++k) tiles.half_norms[k] = padding;
  return true;
}

}  // namespace
