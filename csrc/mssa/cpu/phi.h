// Makes the weights of the values from the weights of a tile: phi = "threshold" and dropout.
#pragma once

#include "../../common/cpu/philox.h"
#include "head.h"

namespace {

// Dropout factors of a tile: rows of tokens against keys.
CRATE_INLINE void dropout_factors(const MssaProblem& p, const MssaHead& head, const int32_t* row_token, int rows,
                                  const int32_t* column_token, float* factors) {
  uint32_t words[kTile];
  int32_t places[kTile];
  for (int c = 0; c < kTile; ++c) places[c] = static_cast<int32_t>(column_token[c] + head.key_start);
  for (int r = 0; r < rows; ++r) {
    philox_word0(p.seed, places, static_cast<uint32_t>(row_token[r] + head.query_start), head.counter, kTile, words);
    for (int c = 0; c < kTile; ++c) factors[r * kTile + c] = words[c] >= p.keep_from ? p.keep_factor : 0.0f;
  }
}

// The weights of the values: phi of the probabilities, times the dropout factors if any. phi = "threshold" compares the
// weights of row r with minimum[r], the level times their sum: divided by it, a probability equal to the level could be
// rounded above it. Forward and backward have the same shifts and sums, and select the same weights.
CRATE_INLINE void transform_weights(const MssaProblem& p, const float* minimum, const float* dropout, int rows,
                                    float* weights) {
  for (int n = 0; n < rows * kTile; n += kLanes) {
    Vf weight = load(weights + n);
    if (p.threshold) weight = select(weight > minimum[n / kTile], splat(p.level), Vf{});
    if (dropout != nullptr) weight *= load(dropout + n);
    store(weights + n, weight);
  }
}

}  // namespace
