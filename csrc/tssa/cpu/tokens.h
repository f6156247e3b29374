// Access to tokens of any dtype and strides, by tiles of one token per lane.
#pragma once

#include <type_traits>

#include "../../common/cpu/convert.h"
#include "../../common/cpu/vec.h"
#include "kernels.h"

namespace {
namespace tssa {

using crate_kernels::kTssaChunk;
using crate_kernels::TssaCpuProblem;
using crate_kernels::TssaCpuTensor;
using crate_kernels::TssaKernel;
using crate_kernels::TssaKernelStep;
using crate_kernels::TssaSequence;
using Floats = TssaCpuTensor<float>;
using Halves = TssaCpuTensor<uint16_t>;  // bf16
using Tokens = TssaCpuTensor<char>;

static_assert(kTssaChunk % kLanes == 0, "a chunk is whole tiles");
constexpr int kTilesPerChunk = kTssaChunk / kLanes;

CRATE_INLINE int vectors_of(const TssaCpuProblem& p) {
  return (p.head_dim + kLanes - 1) / kLanes;
}

// The first `count` of kLanes floats; zero beyond.
CRATE_INLINE Vf load_some(const float* p, int count) {
  if (count == kLanes) return load(p);
  Vf v = {};
  memcpy(&v, p, count * sizeof(float));
  return v;
}
CRATE_INLINE void store_some(float* p, Vf v, int count) {
  if (count == kLanes) {
    store(p, v);
  } else {
    memcpy(p, &v, count * sizeof(float));
  }
}

// Vectors of channels at once: registers hold their factors and sums while tokens pass by.
constexpr int kGroup = kLanes == 16 ? 4 : 2;

// Calls f(its vectors, as a constant type; its first vector) for each group of a head's vectors.
template <class F>
CRATE_INLINE void for_groups(int vectors, const F& f) {
  int v = 0;
  for (; v + kGroup <= vectors; v += kGroup) f(std::integral_constant<int, kGroup>{}, v);
  const int left = vectors - v;
  if (kGroup > 3 && left == 3) f(std::integral_constant<int, 3>{}, v);
  if (kGroup > 2 && left == 2) f(std::integral_constant<int, 2>{}, v);
  if (left == 1) f(std::integral_constant<int, 1>{}, v);
}

template <int kCount>
CRATE_INLINE void load_group(const float* row, Vf (&group)[kCount]) {
#pragma GCC unroll 4
  for (int i = 0; i < kCount; ++i) group[i] = load(row + i * kLanes);
}
template <int kCount>
CRATE_INLINE void store_group(float* row, const Vf (&group)[kCount]) {
#pragma GCC unroll 4
  for (int i = 0; i < kCount; ++i) store(row + i * kLanes, group[i]);
}

// Vector v of token n of one head's tokens.
template <class T>
CRATE_INLINE T* at(const TssaCpuTensor<T>& rows, int n, int v) {
  return rows.data + n * rows.token + v * kLanes;
}
CRATE_INLINE Vf read(const float* p) {
  return load(p);
}
CRATE_INLINE Vf read(const uint16_t* p) {
  return load_bf16(p);
}
CRATE_INLINE void write(float* p, Vf x) {
  store(p, x);
}
CRATE_INLINE void write(uint16_t* p, Vf x) {
  store_bf16(p, x);
}
template <class T>
CRATE_INLINE Vf get(const TssaCpuTensor<T>& rows, int n, int v) {
  return read(at(rows, n, v));
}
template <class T>
CRATE_INLINE void put(const TssaCpuTensor<T>& rows, int n, int v, Vf x) {
  write(at(rows, n, v), x);
}

// Goes from a token to the next one. Hidden from the compiler, which would keep an address per token, in memory.
template <class T>
CRATE_INLINE void step(const TssaCpuTensor<T>& rows, T*& token) {
  token += rows.token;
#if defined(__x86_64__) || defined(__aarch64__)
  asm("" : "+r"(token));
#endif
}

CRATE_INLINE char* element(const Tokens& tokens, Dtype dtype, int64_t h, int64_t n, int64_t d) {
  const int64_t offset = h * tokens.head + n * tokens.token + d * tokens.channel;
  return tokens.data + offset * crate_kernels::itemsize(dtype);
}

// Memory that a thread reuses for every tile.
struct Staging {
  float *w, *grad, *out;            // tiles that need a copy
  float *members, *counted, *dots;  // (nheads, kLanes) each
  float* causal;                    // what the causal form adds

  Staging(const TssaCpuProblem& p, float* memory) {
    const int64_t tile = kLanes * p.row_size(), tokens = kLanes * p.nheads;
    w = memory;
    grad = w + tile;
    out = grad + tile;
    members = out + tile;
    counted = members + tokens;
    dots = counted + tokens;
    causal = dots + tokens;
  }
  // After the tiles, for the causal backward: running sums at each tile, and the dropout factors of a tile.
  static int64_t size(const TssaCpuProblem& p) {
    const int64_t tile = kLanes * p.row_size(), tokens = kLanes * p.nheads;
    const int64_t sums = 2 * p.row_size() + p.head_size();
    return 3 * tile + 3 * tokens + (kTilesPerChunk + 1) * sums + kLanes * p.width() + 2 * tokens + sums;
  }
};

constexpr int kChannelsAtOnce = 256;  // channels per conversion

// A tile of copies in fp32.
CRATE_INLINE Floats tile_at(const TssaCpuProblem& p, float* staging) {
  return {staging, kLanes * p.width(), p.width(), 1};
}

// Copies `count` tokens of every head to a tile in fp32, zero beyond the last token and the last channel.
Floats copy_tile(const TssaCpuProblem& p, const Tokens& tokens, int64_t first, int count, float* staging) {
  const int64_t width = p.width();
  const Floats tile = tile_at(p, staging);
  if (tokens.data == nullptr) return tile;
  for (int h = 0; h < p.nheads; ++h) {
    for (int n = 0; n < count; ++n) {
      float* const row = at(tile.of_head(h), n, 0);
      for (int d = 0; d < p.head_dim; d += kChannelsAtOnce) {
        const int some = p.head_dim - d < kChannelsAtOnce ? p.head_dim - d : kChannelsAtOnce;
        read_row(element(tokens, p.dtype, h, first + n, d), p.dtype, tokens.channel, some, row + d);
      }
      for (int64_t d = p.head_dim; d < width; ++d) row[d] = 0.0f;
    }
    memset(at(tile.of_head(h), count, 0), 0, (kLanes - count) * width * sizeof(float));
  }
  return tile;
}

// Rounds a tile to its place in the tensor.
void store_tile(const TssaCpuProblem& p, const Floats& tile, const Tokens& tokens, int64_t first, int count) {
  for (int h = 0; h < p.nheads; ++h) {
    for (int n = 0; n < count; ++n) {
      for (int d = 0; d < p.head_dim; d += kChannelsAtOnce) {
        const int some = p.head_dim - d < kChannelsAtOnce ? p.head_dim - d : kChannelsAtOnce;
        write_row(element(tokens, p.dtype, h, first + n, d), p.dtype, tokens.channel, some,
                  at(tile.of_head(h), n, 0) + d);
      }
    }
  }
}

// The tensors that a step reads, and the one that it writes; without data: it does not.
struct Operands {
  Tokens w, grad, out;
};

// kLanes tokens of every head of them.
template <class T>
struct TokenTile {
  TssaCpuTensor<T> w, grad, out;
};

CRATE_INLINE bool in_vectors(const Tokens& tokens) {
  return tokens.data == nullptr || tokens.channel == 1;
}
template <class T>
CRATE_INLINE TssaCpuTensor<T> in_place(const TssaCpuProblem& p, const Tokens& tokens, int64_t first) {
  if (tokens.data == nullptr) return {};
  return {reinterpret_cast<T*>(element(tokens, p.dtype, 0, first, 0)), tokens.head, tokens.token, 1};
}
template <class T>
CRATE_INLINE TokenTile<T> in_place(const TssaCpuProblem& p, const Operands& t, int64_t first) {
  return {in_place<T>(p, t.w, first), in_place<T>(p, t.grad, first), in_place<T>(p, t.out, first)};
}

// Calls body(tile) for `count` tokens. The tile lies in the tensors themselves if they are whole vectors of fp32 or
// bf16, and whole tiles. Otherwise it is a copy in fp32, and what the body writes is stored afterwards.
template <class Body>
CRATE_INLINE void with_tile(const TssaCpuProblem& p, const Operands& t, int64_t first, int count,
                            const Staging& staging, const Body& body) {
  const bool whole =
      count == kLanes && p.head_dim % kLanes == 0 && in_vectors(t.w) && in_vectors(t.grad) && in_vectors(t.out);
  if (whole && p.dtype == Dtype::bf16) return body(in_place<uint16_t>(p, t, first));
  if (whole && p.dtype == Dtype::f32) return body(in_place<float>(p, t, first));
  const Floats out = tile_at(p, staging.out);
  body(TokenTile<float>{copy_tile(p, t.w, first, count, staging.w), copy_tile(p, t.grad, first, count, staging.grad),
                        out});
  if (t.out.data != nullptr) store_tile(p, out, t.out, first, count);
}

// Calls body(first token, tokens) for each tile of a chunk.
template <class Body>
CRATE_INLINE void for_tiles(const TssaSequence& s, int64_t chunk, const Body& body) {
  const int64_t begin = chunk * kTssaChunk;
  const int64_t end = begin + kTssaChunk < s.seqlen ? begin + kTssaChunk : s.seqlen;
  for (int64_t first = begin; first < end; first += kLanes) {
    body(first, static_cast<int>(end - first < kLanes ? end - first : kLanes));
  }
}

}  // namespace tssa
}  // namespace
