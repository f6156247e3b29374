// emulator_async.h: products of warp groups.
#include <cstring>

#include "emulator_numbers.h"
#include "emulator_state.h"

namespace emulator::async {
namespace {

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

// The numbers of an operand's 16-byte runs, which no swizzle splits: eight along K, or along M or N; to[k][row].
void read_operand(Issued& issued, uint64_t descriptor, bool mn_major, int rows, double (*to)[256]) {
  for (int r = 0; r < rows; r += mn_major ? 8 : 1) {
    for (int k = 0; k < 16; k += mn_major ? 1 : 8) {
      const uint32_t address = place(descriptor, mn_major, r, k);
      uint16_t bits[8];
      memcpy(bits, at(address, 16, 16), 16);
      for (int n = 0; n < 8; ++n) (mn_major ? to[k][r + n] : to[k + n][r]) = to_number(bits[n], issued.what.half);
      issued.runs.push_back(static_cast<int>((address - kBase) / kGranule));
    }
  }
}

void execute(Issued& issued) {
  static double a[16][256], b[16][256], sums[256];
  const Product& p = issued.what;
  if (p.a_in_registers) {
    for (int m = 0; m < 64; ++m) {
      for (int k = 0; k < 16; ++k) {
        const int thread = m / 16 * 32 + m % 8 * 4 + k % 8 / 2;
        const uint32_t pair = issued.registers[thread][m % 16 / 8 + k / 8 * 2];
        a[k][m] = to_number(static_cast<uint16_t>(k % 2 ? pair >> 16 : pair), p.half);
      }
    }
  } else {
    read_operand(issued, p.a, p.mn_a, 64, a);
  }
  read_operand(issued, p.b, p.mn_b, p.columns, b);
  const int count = p.columns / 2;
  for (int row = 0; row < 64; ++row) {
    multiply_row(a, b, row, p.columns, sums);
    for (int column = 0; column < p.columns; ++column) {
      const int thread = row / 16 * 32 + row % 8 * 4 + column % 8 / 2;
      const int i = column / 8 * 4 + row % 16 / 8 * 2 + column % 2;
      float& value = issued.chain->values[thread * count + i];
      value = static_cast<float>(p.adds ? sums[column] + value : sums[column]);
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
  std::vector<Granule>& granules = block().granules;
  const int first = me() / 128 * 128;
  Access readers[4];
  for (int warp = 0; warp < 4; ++warp) {
    const int thread = first + 32 * warp;
    readers[warp] = {thread, state.threads[thread].clock.seen(thread)};
  }
  for (const int run : issued.runs) {
    for (int n = run; n < run + 16 / kGranule; ++n) {
      check_visible(granules[n], issued.issue);
      for (const Access& reader : readers) granules[n].read_by(reader);
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
    const ThreadState* const threads = &state.threads[first];
    issued.issue = common({&threads[0].clock, &threads[32].clock, &threads[64].clock, &threads[96].clock});
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
