// emulator_async.h: products of warp groups.
#include <algorithm>
#include <cstring>

#include <torch/headeronly/util/Half.h>

#include "emulator_state.h"

namespace emulator::async {
namespace {

float to_number(uint16_t bits, bool half) {
  if (half) return c10::detail::fp16_ieee_to_fp32_value(bits);
  return bits_of<float>(static_cast<uint32_t>(bits) << 16);
}

// The address of element (r, k) of an operand: r along M or N.
uint32_t place(uint64_t descriptor, bool mn_major, int r, int k) {
  const uint32_t start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4;
  const uint32_t stride = (descriptor >> 32 & 0x3fff) << 4, mode = descriptor >> 62;
  const int row = mode == 0 ? 8 : 128 >> mode;  // elements of an atom's row
  uint32_t address;
  if (mode == 0) {
    const int within = mn_major ? k % 8 * 16 + r % 8 * 2 : r % 8 * 16 + k % 8 * 2;
    address = start + r / 8 * stride + k / 8 * leading + within;
  } else if (mn_major) {
    address = start + r / row * leading + k / 8 * stride + k % 8 * (row * 2) + r % row * 2;
  } else {
    address = start + r / 8 * stride + r % 8 * (row * 2) + k * 2;
  }
  return mode == 0 ? address : address ^ (address >> 7 & (row / 8 - 1)) << 4;
}

uint16_t operand_bits(Issued& issued, uint32_t address) {
  uint16_t bits;
  memcpy(&bits, at(address, 2, 2), 2);
  issued.granules.push_back(static_cast<int>((address - kBase) / kGranule));
  return bits;
}

void execute(Issued& issued) {
  static float a[64][16], b[256][16];
  const Product& p = issued.what;
  for (int m = 0; m < 64; ++m) {
    for (int k = 0; k < 16; ++k) {
      if (p.a_in_registers) {
        const int thread = m / 16 * 32 + m % 8 * 4 + k % 8 / 2;
        const uint32_t pair = issued.registers[thread][m % 16 / 8 + k / 8 * 2];
        a[m][k] = to_number(static_cast<uint16_t>(k % 2 ? pair >> 16 : pair), p.half);
      } else {
        a[m][k] = to_number(operand_bits(issued, place(p.a, p.mn_a, m, k)), p.half);
      }
    }
  }
  for (int n = 0; n < p.columns; ++n) {
    for (int k = 0; k < 16; ++k) b[n][k] = to_number(operand_bits(issued, place(p.b, p.mn_b, n, k)), p.half);
  }
  const int count = p.columns / 2;
  for (int thread = 0; thread < 128; ++thread) {
    for (int i = 0; i < count; ++i) {
      const int row = thread / 32 * 16 + thread % 32 / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + thread % 4 * 2 + i % 2;
      double sum = 0.0;
      for (int k = 0; k < 16; ++k) sum += static_cast<double>(a[row][k]) * b[column][k];
      float& value = issued.chain->values[thread * count + i];
      value = static_cast<float>(p.adds ? sum + value : sum);
    }
  }
}

// The warp group has waited for a product: what it read may be written from now on, and its sums may be read.
void retire(WarpGroup& group, Issued& issued) {
  if (!device().early) execute(issued);
  for (int thread = 0; issued.what.a_in_registers && thread < 128; ++thread) {
    if (memcmp(issued.registers[thread], issued.copies[thread].data(), 16) != 0) {
      fail("registers of an operand changed before the product was waited for");
    }
  }
  std::sort(issued.granules.begin(), issued.granules.end());
  issued.granules.erase(std::unique(issued.granules.begin(), issued.granules.end()), issued.granules.end());
  const int first = me() / 128 * 128;
  for (const int n : issued.granules) {
    Granule& g = block().granules[n];
    for (const Clock& issue : issued.issue) check_visible(g, issue);
    for (int warp = 0; warp < 4; ++warp) {
      const Access reader = {first + 32 * warp, state.threads[first + 32 * warp].clock.seen[first + 32 * warp]};
      bool known = false;
      for (Access& r : g.readers) {
        if (r.thread == reader.thread) r.step = reader.step, known = true;
      }
      if (!known) g.readers.push_back(reader);
    }
  }
  Chain& chain = *issued.chain;
  if (--chain.products > 0) return;
  const int count = chain.columns / 2;
  for (int thread = 0; thread < 128; ++thread) {
    memcpy(chain.sums[thread], &chain.values[thread * count], count * sizeof(float));
  }
  group.chains.erase(chain.sums[0]);
}

}  // namespace

void by_warp_group(void* pointer, const std::function<void(void* const*)>& act) {
  WarpGroup& group = warp_group();
  group.mine[current->index % 128] = pointer;
  if (group.barrier.arrived == 127) act(group.mine);
  wait_unordered(group.barrier, 128);
}

void product_fence() {
  by_warp_group(nullptr, [](void* const*) { warp_group().fenced = true; });
}

void product(const Product& what, float* sums, const uint32_t* registers) {
  struct Mine {
    float* sums;
    const uint32_t* registers;
  } pointers = {sums, registers};
  by_warp_group(&pointers, [&what](void* const* all) {
    WarpGroup& group = warp_group();
    if (!group.fenced) fail("a product is issued with no wgmma_fence since the last wait");
    const int first = me() / 128 * 128, count = what.columns / 2;
    float* const key = static_cast<Mine*>(all[0])->sums;
    std::unique_ptr<Chain>& chain = group.chains[key];
    if (chain == nullptr) {
      chain = std::make_unique<Chain>();
      chain->columns = what.columns;
      chain->values.resize(128 * count);
      for (int thread = 0; thread < 128; ++thread) {
        float* const own = static_cast<Mine*>(all[thread])->sums;
        chain->sums[thread] = own;
        memcpy(&chain->values[thread * count], own, count * sizeof(float));
        memset(own, 0xff, count * sizeof(float));
      }
    }
    if (chain->columns != what.columns) fail("products of two widths have the same sums");
    ++chain->products;
    Issued issued = {what, chain.get(), {}, {}, {}, {}};
    for (int thread = 0; what.a_in_registers && thread < 128; ++thread) {
      issued.registers[thread] = static_cast<Mine*>(all[thread])->registers;
      issued.copies.push_back({});
      memcpy(issued.copies.back().data(), issued.registers[thread], 16);
    }
    for (int warp = 0; warp < 4; ++warp) issued.issue[warp] = state.threads[first + 32 * warp].clock;
    if (device().early) execute(issued);
    group.open.push_back(std::move(issued));
  });
}

void product_commit() {
  by_warp_group(nullptr, [](void* const*) {
    WarpGroup& group = warp_group();
    group.committed.push_back(std::move(group.open));
    group.open.clear();
  });
}

void product_wait(int groups) {
  by_warp_group(nullptr, [groups](void* const*) {
    WarpGroup& group = warp_group();
    const bool any = static_cast<int>(group.committed.size()) > groups;
    for (; static_cast<int>(group.committed.size()) > groups; group.committed.pop_front()) {
      for (Issued& issued : group.committed.front()) retire(group, issued);
    }
    if (any) group.fenced = false;
  });
  step();
}

}  // namespace emulator::async
