// Kernels for test_mma.py: one tensor-core product, and products of tiles of tokens.
#include "../../../csrc/mssa/cuda/mma_tile.cuh"
#include "probe.h"

namespace crate_kernels {
namespace {

// d = a b for matrices in global memory, with the fragments that mma.cuh describes.
template <class T>
__global__ void product_kernel(const T* a, const T* b, float* d) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  const auto pair = [](T low, T high) { return low.bits | static_cast<uint32_t>(high.bits) << 16; };
  const auto of_a = [&](int row, int column) { return pair(a[row * 16 + column], a[row * 16 + column + 1]); };
  const auto of_b = [&](int row) { return pair(b[row * 8 + g], b[(row + 1) * 8 + g]); };
  const uint32_t left[4] = {of_a(g, 2 * t), of_a(g + 8, 2 * t), of_a(g, 2 * t + 8), of_a(g + 8, 2 * t + 8)};
  const uint32_t right[2] = {of_b(2 * t), of_b(2 * t + 8)};
  float sums[4] = {d[g * 8 + 2 * t], d[g * 8 + 2 * t + 1], d[(g + 8) * 8 + 2 * t], d[(g + 8) * 8 + 2 * t + 1]};
  mma_16816<T>(sums, left, right);
  for (int i = 0; i < 4; ++i) d[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = sums[i];
}

// From 16 rows of w: scores = w w^T, mixed = p w, turned = p^T w; p is 16x16. All three go through shared memory.
template <class T, int DIM>
__global__ void tile_kernel(mssa::View<const T> w, mssa::View<const T> p, mssa::Access access, int length,
                            float* scores, float* mixed, float* turned) {
  using namespace mssa;
  T *const tile = reinterpret_cast<T*>(shared_memory()), *const weights = tile + 16 * DIM;
  load_tile<T, DIM>(tile, w, 16, 0, length, access);
  load_tile<T, 16>(weights, p, 16, 0, 16, {16, true});
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  float s[2][4] = {}, m[1][DIM / 8][4] = {}, c[1][DIM / 8][4] = {};
  uint32_t a[4], b[2][2], straight[1][4], transposed[1][4];
  left<16>(straight[0], weights, 0);
  left_transposed<16>(transposed[0], weights, 0);
  for (int k = 0; k < DIM / 16; ++k) {
    left<DIM>(a, tile, k);
    right_transposed<DIM>(b, tile, k);
    add_pair<T>(s[0], s[1], a, b);
  }
  add_rows<T, DIM>(m, straight, tile);
  add_rows<T, DIM>(c, transposed, tile);
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = g + i / 2 * 8, column = 2 * t + i % 2;
    for (int n = 0; n < 2; ++n) scores[row * 16 + 8 * n + column] = s[n][i];
    for (int n = 0; n < DIM / 8; ++n) {
      mixed[row * DIM + 8 * n + column] = m[0][n][i];
      turned[row * DIM + 8 * n + column] = c[0][n][i];
    }
  }
}

void product(Tensor a, Tensor b, Tensor d) {
  with_half(a, [&](auto zero) {
    using T = decltype(zero);
    launch<product_kernel<T>>({1, 32}, static_cast<const T*>(a.data_ptr()), static_cast<const T*>(b.data_ptr()),
                              static_cast<float*>(d.data_ptr()));
  });
}

template <int DIM>
void tile_of(Tensor w, Tensor p, int64_t length, bool wide, Tensor scores, Tensor mixed, Tensor turned) {
  const mssa::Access access = {static_cast<int>(w.size(1)), wide};
  const auto floats = [](const Tensor& t) { return static_cast<float*>(t.data_ptr()); };
  with_half(w, [&](auto zero) {
    using T = decltype(zero);
    const mssa::View<const T> from = {static_cast<const T*>(w.data_ptr()), w.stride(0), w.stride(1)};
    const mssa::View<const T> weights = {static_cast<const T*>(p.data_ptr()), 16, 1};
    launch<tile_kernel<T, DIM>>({1, 32, 16 * (DIM + 16) * 2}, from, weights, access, static_cast<int>(length),
                                floats(scores), floats(mixed), floats(turned));
  });
}

void tile(Tensor w, Tensor p, int64_t dim, int64_t length, bool wide, Tensor scores, Tensor mixed, Tensor turned) {
  const auto run = [&](auto f) { f(w, p, length, wide, scores, mixed, turned); };
  if (dim == 16) return run(tile_of<16>);
  if (dim == 32) return run(tile_of<32>);
  if (dim == 48) return run(tile_of<48>);
  if (dim == 64) return run(tile_of<64>);
  if (dim == 96) return run(tile_of<96>);
  if (dim == 128) return run(tile_of<128>);
  STD_TORCH_CHECK(dim == 256, "no probe of tiles of ", dim);
  run(tile_of<256>);
}

// Offset of every chunk of a tile, in chunks.
template <int DIM>
void offsets_of(int64_t* to, int64_t rows) {
  for (int row = 0; row < rows; ++row) {
    for (int chunk = 0; chunk < DIM / mssa::kHalves; ++chunk) {
      *to++ = mssa::tile_offset<DIM>(row, chunk) / mssa::kHalves;
    }
  }
}

void offsets(Tensor out) {
  int64_t* const to = static_cast<int64_t*>(out.data_ptr());
  const int64_t rows = out.size(0), dim = out.size(1) * mssa::kHalves;
  if (dim == 16) return offsets_of<16>(to, rows);
  if (dim == 32) return offsets_of<32>(to, rows);
  if (dim == 48) return offsets_of<48>(to, rows);
  if (dim == 64) return offsets_of<64>(to, rows);
  if (dim == 96) return offsets_of<96>(to, rows);
  if (dim == 112) return offsets_of<112>(to, rows);
  if (dim == 128) return offsets_of<128>(to, rows);
  STD_TORCH_CHECK(dim == 256, "no probe of tiles of ", dim);
  offsets_of<256>(to, rows);
}

// Number of 16x8x16 products that the emulated tensor cores have computed so far.
int64_t products() {
  return emulated::products;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(crate_kernels_C, m) {
  m.def("probe_product(Tensor a, Tensor b, Tensor(a!) d) -> ()");
  m.def(
      "probe_tile(Tensor w, Tensor p, int dim, int length, bool wide, Tensor(a!) scores, Tensor(b!) mixed, "
      "Tensor(c!) turned) -> ()");
  m.def("probe_offsets(Tensor(a!) out) -> ()");
  m.def("probe_products() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(crate_kernels_C, CPU, m) {
  m.impl("probe_product", TORCH_BOX(&product));
  m.impl("probe_tile", TORCH_BOX(&tile));
  m.impl("probe_offsets", TORCH_BOX(&offsets));
}

STABLE_TORCH_LIBRARY_IMPL(crate_kernels_C, CompositeExplicitAutograd, m) {
  m.impl("probe_products", TORCH_BOX(&products));
}

}  // namespace crate_kernels
