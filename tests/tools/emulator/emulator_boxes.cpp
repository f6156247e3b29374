// emulator_hopper.h: what moves boxes of tensors and runs of bytes, and adds to four numbers.
#include "../../../csrc/common/cuda/hopper.cuh"

namespace crate_kernels {

void tensor_load(uint32_t shared, const TensorMap& map, uint32_t barrier, int x, int y, int z, int w) {
  emulated::Map m;
  memcpy(&m, &map, sizeof m);
  const int at[4] = {x, y, z, w}, row = m.box[0] * m.element;
  const Swizzle swizzle = static_cast<Swizzle>(m.swizzle);
  const int span = swizzle == Swizzle::k128 ? 128 : swizzle == Swizzle::k64 ? 64 : swizzle == Swizzle::k32 ? 32 : 16;
  if (shared % (swizzle == Swizzle::kNone ? 128 : 8 * span) != 0)
    emulator::fail("a box begins at a multiple of its atom");
  if (swizzle != Swizzle::kNone && row > span) emulator::fail("a row of a box is at most as long as its swizzle");
  if (row % 16 != 0) emulator::fail("a row of a box is a multiple of 16 bytes");
  std::vector<unsigned char> box(static_cast<size_t>(row) * m.box[1] * m.box[2] * m.box[3]);
  int64_t n = 0;
  for (int i3 = 0; i3 < m.box[3]; ++i3) {
    for (int i2 = 0; i2 < m.box[2]; ++i2) {
      for (int i1 = 0; i1 < m.box[1]; ++i1) {
        for (int i0 = 0; i0 < m.box[0]; ++i0, ++n) {
          const int64_t index[4] = {at[0] + i0, at[1] + i1, at[2] + i2, at[3] + i3};
          bool inside = true;
          int64_t from = 0;
          for (int d = 0; d < 4; ++d) {
            inside = inside && index[d] >= 0 && index[d] < m.sizes[d];
            from += index[d] * m.strides[d];
          }
          uint32_t to = shared + static_cast<uint32_t>(n * m.element);
          if (swizzle != Swizzle::kNone) to ^= (to >> 7 & (span / 16 - 1)) << 4;
          if (!inside) continue;
          emulator::async::touched(m.base + from, m.element);
          memcpy(&box[to - shared], m.base + from, m.element);
        }
      }
    }
  }
  emulator::async::load(shared, box, barrier);
}

void bulk_load(uint32_t shared, const void* global, int bytes, uint32_t barrier) {
  if (bytes <= 0 || bytes % 16 != 0 || reinterpret_cast<uintptr_t>(global) % 16 != 0) {
    emulator::fail("bulk copies are of multiples of 16 bytes");
  }
  const auto* const from = static_cast<const unsigned char*>(global);
  emulator::async::touched(from, bytes);
  emulator::async::load(shared, {from, from + bytes}, barrier);
}
void add_global_4(float* to, float x, float y, float z, float w) {
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0) emulator::fail("four numbers begin at a multiple of 16 bytes");
  emulator::async::added(to, 16);
  to[0] += x, to[1] += y, to[2] += z, to[3] += w;
}

}  // namespace crate_kernels
