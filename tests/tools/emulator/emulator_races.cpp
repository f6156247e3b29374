// Races of any access to memory. Where a kernel is compiled with -fsanitize=thread (gpu.py: `traced`), the compiler
// calls these functions before each access, in place of the sanitizer's own library.
//
// Shared memory is followed as emulator_async.h says. Global memory is too, among the blocks that run together. Other
// blocks of a launch may run in any order, so none of them may touch what one of them has written.
#include <array>
#include <bitset>
#include <cstdio>
#include <memory>
#include <string>
#include <unordered_map>

#include <dlfcn.h>

#include "emulator_state.h"

namespace emulator::async {
namespace {

constexpr uintptr_t kPage = 4096;
constexpr int kReads = 1, kWrites = 2, kAdds = 4;

struct Earlier {
  unsigned blocks = 0;  // the group that ran here last
  int kinds = 0;        // what earlier groups did
};

struct Moved {
  int64_t read = 0, written = 0;  // bytes
};

struct Page {
  bool of_block;  // a static array in shared memory, which one block after another has
  std::array<Moved, kPage / kGranule> moved;
  std::array<Granule, kPage / kGranule> granules;
  std::array<Earlier, kPage / kGranule> earlier;
};

// Null: memory of a thread, which no other sees.
std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages;
uintptr_t last = 0;  // the page of the last access
Page* found = nullptr;
unsigned group = 0;

Page* page_of(uintptr_t at) {
  const uintptr_t number = at / kPage;
  if (number == last) return found;
  last = number;
  const auto place = pages.find(number);
  if (place != pages.end()) return found = place->second.get();
  Dl_info library;
  const void* const address = reinterpret_cast<const void*>(at);
  auto page = on_stack(address) ? nullptr : std::make_unique<Page>();
  if (page != nullptr) page->of_block = dladdr(address, &library) != 0;
  return found = (pages[number] = std::move(page)).get();
}

bool unordered(const Access& other, uint8_t bytes) {
  return other.thread >= 0 && (other.bytes & bytes) != 0 && other.thread != me() &&
         mine().clock.seen(other.thread) < other.step;
}

// Where the access is, for messages.
const void* instruction = nullptr;

[[noreturn]] void fail_race(const char* what, const Access& other) {
  const auto of_block = [](int thread) {
    const int threads = static_cast<int>(state.group->threads);
    const unsigned block = state.group->blocks[thread / threads].index;
    return "thread " + std::to_string(thread % threads) + " of block " + std::to_string(block);
  };
  std::string message = std::string(what) + ": " + of_block(me());
  if (other.thread >= 0 && other.thread < threads()) message += ", " + of_block(other.thread);
  Dl_info library;
  if (instruction != nullptr && dladdr(instruction, &library) != 0) {
    char offset[32];
    snprintf(offset, sizeof offset, " 0x%tx",
             static_cast<const char*>(instruction) - static_cast<const char*>(library.dli_fbase) - 1);
    message += std::string("; addr2line -Cfie ") + library.dli_fname + offset;
  }
  fail(message.c_str());
}

void follow(Granule& g, const Access& access, int kind) {
  const bool writes = kind != kReads;
  if (g.landing)
    fail_race(writes ? "shared memory is written while a copy may land there" : "a thread reads what has not landed",
              g.writer);
  const auto check_writer = [&](const Access& writer) {
    if (!unordered(writer, access.bytes) || (writer.adds && access.adds)) return;
    fail_race(writes ? "memory is written twice with no barrier between"
                     : "a thread reads what no barrier has ordered before it",
              writer);
  };
  check_writer(g.writer);
  for (const Access& writer : g.others) check_writer(writer);
  if (!writes) return g.read_by(access);
  for (const Access& reader : g.readers) {
    if (!read_before(reader) && unordered(reader, access.bytes))
      fail_race("memory is written while another thread or a product may read it", reader);
  }
  if (unordered(g.writer, 0xf)) {
    g.others.push_back(g.writer);
  } else if (access.bytes == 0xf) {
    g.others.clear();
  }
  g.writer = access;
  if (access.bytes == 0xf) g.readers.clear();
}

void follow_global(Page& page, size_t n, const Access& access, int kind) {
  Granule& g = page.granules[n];
  Earlier& earlier = page.earlier[n];
  if (earlier.blocks != group) {
    if (!g.readers.empty()) earlier.kinds |= kReads;
    if (g.writer.thread >= 0) earlier.kinds |= g.writer.adds ? kAdds : kWrites;
    if (page.of_block) earlier.kinds = 0;
    earlier.blocks = group;
    g = {};
  }
  const int others = kind == kReads ? kWrites | kAdds : kind == kAdds ? kReads | kWrites : kReads | kWrites | kAdds;
  if ((earlier.kinds & others) != 0)
    fail_race("global memory is touched by blocks that nothing orders, and one writes", {-1, 0});
  follow(g, access, kind);
}

uint8_t bytes_of(uintptr_t granule, uintptr_t at, uintptr_t end) {
  uint8_t found = 0;
  for (int n = 0; n < kGranule; ++n) {
    if (granule + n >= at && granule + n < end) found |= 1 << n;
  }
  return found;
}

void access(const void* pointer, int64_t size, int kind, const void* by = nullptr) {
  if (!device().traced || current == nullptr) return;
  instruction = by;
  Access access = access_now();
  access.adds = kind == kAdds;
  const auto at = reinterpret_cast<uintptr_t>(pointer), end = at + size;
  for (unsigned b = 0; b < state.group->count; ++b) {
    const Block& block = state.group->blocks[b];
    const auto shared = reinterpret_cast<uintptr_t>(block.shared);
    if (at < shared || end > shared + block.shared_bytes) continue;
    for (uintptr_t n = at / kGranule * kGranule; n < end; n += kGranule) {
      access.bytes = bytes_of(n, at, end);
      follow(state.blocks[b].granules[(n - shared) / kGranule], access, kind);
    }
    return;
  }
  for (uintptr_t n = at / kGranule * kGranule; n < end; n += kGranule) {
    Page* const page = page_of(n);
    if (page == nullptr) return;
    access.bytes = bytes_of(n, at, end);
    Moved& moved = page->moved[n % kPage / kGranule];
    const int bytes = std::bitset<kGranule>(access.bytes).count();
    if (kind != kWrites) moved.read += bytes;
    if (kind != kReads) moved.written += bytes;
    follow_global(*page, n % kPage / kGranule, access, kind);
  }
}

}  // namespace

void forget_pages() {
  pages.clear();
  last = group = 0;
}

void next_group() {
  ++group;
}

void touched(const void* at, int64_t bytes) {
  access(at, bytes, kReads);
}

void stored(const void* at, int64_t bytes) {
  access(at, bytes, kWrites);
}

void added(const void* at, int64_t bytes) {
  access(at, bytes, kAdds);
}

void check_peers() {
  if (!device().traced || !state.active) return;
  const auto block_of = [](int thread) { return static_cast<unsigned>(thread) / state.group->threads; };
  for (unsigned b = 0; b < state.group->count; ++b) {
    for (const Granule& g : state.blocks[b].granules) {
      for (const Access& reader : g.readers) {
        if (reader.thread >= threads() || block_of(reader.thread) == b) continue;
        bool known = false;
        for (unsigned n = 0; n < state.group->threads && !known; ++n) {
          known = state.threads[b * state.group->threads + n].clock.seen(reader.thread) >= reader.step;
        }
        if (!known) return report("a block may end before a peer has read its shared memory");
      }
    }
  }
}

void counted(const uint32_t* counter) {
  if (!state.active) return;
  std::vector<Gathered>& arrivals = state.counters[counter];
  if (arrivals.empty()) {
    arrivals.emplace_back();
  } else {
    arrivals.push_back(arrivals.back());
  }
  arrivals.back().add(mine().clock);
  step();
}

void waited(const uint32_t* counter, uint32_t count) {
  if (!state.active) return;
  mine().clock.join(state.counters[counter].at(count - 1));
  step();
}

}  // namespace emulator::async

#define EMULATED_API extern "C" __attribute__((visibility("default")))
#define EMULATED_FUNCTION(NAME, KIND, SIZE)                               \
  EMULATED_API void __tsan_##NAME(const void* at) {                       \
    emulator::async::access(at, SIZE, KIND, __builtin_return_address(0)); \
  }
#define EMULATED_ACCESS(SIZE)                                            \
  EMULATED_FUNCTION(read##SIZE, emulator::async::kReads, SIZE)           \
  EMULATED_FUNCTION(write##SIZE, emulator::async::kWrites, SIZE)         \
  EMULATED_FUNCTION(unaligned_read##SIZE, emulator::async::kReads, SIZE) \
  EMULATED_FUNCTION(unaligned_write##SIZE, emulator::async::kWrites, SIZE)

EMULATED_ACCESS(1)
EMULATED_ACCESS(2)
EMULATED_ACCESS(4)
EMULATED_ACCESS(8)
EMULATED_ACCESS(16)
EMULATED_API void __tsan_read_range(const void* at, size_t size) {
  emulator::async::access(at, static_cast<int64_t>(size), emulator::async::kReads, __builtin_return_address(0));
}
EMULATED_API void __tsan_write_range(const void* at, size_t size) {
  emulator::async::access(at, static_cast<int64_t>(size), emulator::async::kWrites, __builtin_return_address(0));
}
EMULATED_API void __tsan_init() {}

// How many bytes the last launch read from a tensor in global memory, or wrote to it.
EMULATED_API int64_t emulated_moved(const void* tensor, int64_t size, bool written) {
  using namespace emulator::async;
  int64_t found = 0;
  const auto at = reinterpret_cast<uintptr_t>(tensor);
  for (uintptr_t n = at / kGranule * kGranule; n < at + size; n += kGranule) {
    const auto place = pages.find(n / kPage);
    if (place == pages.end() || place->second == nullptr) continue;
    const Moved& moved = place->second->moved[n % kPage / kGranule];
    found += written ? moved.written : moved.read;
  }
  return found;
}
