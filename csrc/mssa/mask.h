// The mask by position: which keys a query may see. CPU and CUDA kernels ask only here; padding, packing and dropout
// are elsewhere.
//
// The mask is a band: it depends only on query - key, and the keys that a query may see have no gap.
#pragma once

#ifdef __CUDACC__
#define CRATE_MASK __device__ __forceinline__
#else
#define CRATE_MASK static inline __attribute__((always_inline))  // units of different instruction sets share no symbol
#endif

namespace crate_kernels::mssa {

struct Mask {
  bool causal = false;
};

// The mask of new tokens over a cache.
CRATE_MASK constexpr Mask cache_mask() {
  return {true};
}

// Positions [first, stop) of queries or keys. A cached token has a position too: new tokens follow it.
struct Span {
  int first, stop;
};

CRATE_MASK bool sees(Mask m, int query, int key) {
  return !m.causal | (key <= query);
}

// True if every query may see every key.
CRATE_MASK bool hides_none(Mask m) {
  return !m.causal;
}

// The `length` keys without those before the first and after the last that one of `queries` may see.
CRATE_MASK Span keys_of(Mask m, Span queries, int length) {
  return {0, m.causal && queries.stop < length ? queries.stop : length};
}

// The `length` queries without those before the first and after the last that may see one of `keys`.
CRATE_MASK Span queries_of(Mask m, Span keys, int length) {
  return {m.causal ? keys.first : 0, length};
}

// The rows with which `rows` share weights, as keys of them and, if `as_queries`, as their queries.
CRATE_MASK Span partners_of(Mask m, Span rows, int length, bool as_queries) {
  const Span queries = queries_of(m, rows, length), keys = keys_of(m, rows, length);
  if (!as_queries) return queries;
  return {keys.first < queries.first ? keys.first : queries.first, keys.stop > queries.stop ? keys.stop : queries.stop};
}

// The tiles of `width` rows that cover a span.
CRATE_MASK Span tiles_of(Span s, int width) {
  return {s.first / width, (s.stop + width - 1) / width};
}

// True if some of `queries` may see some of `keys`.
CRATE_MASK bool meets(Mask m, Span queries, Span keys) {
  const Span seen = keys_of(m, queries, keys.stop);
  return seen.first < keys.stop && keys.first < seen.stop;
}

// True if a tile of these queries and keys needs its mask. In a band, the two corners off the diagonal decide.
CRATE_MASK bool cuts(Mask m, Span queries, Span keys) {
  return !(sees(m, queries.first, keys.stop - 1) & sees(m, queries.stop - 1, keys.first));
}

// True if a query may see no key although none is padded. If false, every key sees itself, and forms that shift a
// row's scores by its own norm are safe.
CRATE_MASK bool may_be_empty(Mask m) {
  return !sees(m, 0, 0);
}

}  // namespace crate_kernels::mssa
