// The fibers of emulator.h: threads, warps, blocks and clusters.
#include <csignal>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <ucontext.h>

#include <torch/headeronly/util/Exception.h>

#include "../../../csrc/common/cuda/mma.cuh"
#include "emulator_async.h"
#include "emulator_memory.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulator {

Thread* current = nullptr;

namespace {

constexpr int64_t kStack = 256 * 1024, kCanary = 256;

using Context = void* [5];  // of the compiler's own setjmp: five words, where the library's saves all registers

struct alignas(64) Fiber {
  Context context;  // in one line of the processor's cache with what it waits for
  const Barrier* waits = nullptr;
  uint64_t generation = 0;
  const std::function<bool()>* until = nullptr;
  Thread thread;
  bool started = false, done = false;
  Guarded stack{kStack};
};

std::vector<std::unique_ptr<Fiber>> fibers;
const std::function<void()>* body = nullptr;
Context scheduler;
ucontext_t first_entry;
Fiber* running = nullptr;
std::vector<const unsigned char*> stacks;  // of all fibers, in order
bool failed = false;
std::string failure;

// Not in the function that comes back here: the compiler may then take the jump for one within its own frame.
[[noreturn]] __attribute__((noinline)) void jump(Context& to) {
  __builtin_longjmp(to, 1);
}

bool runnable(const Fiber& fiber) {
  if (fiber.done || (fiber.waits != nullptr && fiber.waits->generation == fiber.generation)) return false;
  return fiber.until == nullptr || (*fiber.until)();
}

// The lanes of a warp in the order in which they run, and the place of the running one.
struct Turn {
  std::unique_ptr<Fiber>* lanes;
  bool descending;
  int place;

  Fiber& lane() const { return *lanes[descending ? 31 - place : place]; }
} turn;

void enter(Fiber& fiber) {
  fiber.waits = nullptr;
  fiber.until = nullptr;
  running = &fiber;
  current = &fiber.thread;
  threadIdx.x = current->index;
  blockIdx.x = current->block->index;
}

// Goes on in the next lane of the warp that can, else in the scheduler, which starts fibers and counts those that end.
[[noreturn]] __attribute__((noinline)) void leave_fiber() {
  while (!running->done && ++turn.place < 32) {
    Fiber& fiber = turn.lane();
    if (!runnable(fiber)) continue;
    if (!fiber.started) {
      --turn.place;
      break;
    }
    enter(fiber);
    jump(fiber.context);
  }
  jump(scheduler);
}

__attribute__((noinline)) void suspend() {
  if (__builtin_setjmp(running->context) == 0) leave_fiber();
}

void leave(Barrier& barrier, int live) {
  if (barrier.arrived > 0 && barrier.arrived == live) {
    barrier.arrived = 0;
    ++barrier.generation;
    async::completed(barrier);
  }
}

void wait(Barrier& barrier, int live) {
  const uint64_t generation = barrier.generation;
  ++barrier.arrived;
  leave(barrier, live);
  if (barrier.generation != generation) return;
  running->waits = &barrier;
  running->generation = generation;
  suspend();
}

// A fiber outlives its thread: the next thread starts on the same stack.
void loop() {
  for (;;) {
    (*body)();
    Thread& t = running->thread;
    running->done = true;
    --t.warp->live;
    leave(t.block->barrier, --t.block->live);
    leave(t.block->cluster->barrier, --t.block->cluster->live);
    if (t.warp->barrier.arrived + t.warp->sync.arrived > 0) fail("a lane has returned while its warp waits for it");
    suspend();
  }
}

__attribute__((noinline)) void resume(Fiber& fiber) {
  enter(fiber);
  if (__builtin_setjmp(scheduler) == 0) {
    if (fiber.started) jump(fiber.context);
    fiber.started = true;
    ucontext_t entry;
    getcontext(&entry);
    entry.uc_stack.ss_sp = fiber.stack.begin();
    entry.uc_stack.ss_size = kStack;
    entry.uc_link = nullptr;
    makecontext(&entry, loop, 0);
    swapcontext(&first_entry, &entry);
  }
}

void on_fault(int signal, siginfo_t*, void*) {
  if (running == nullptr) {
    std::signal(signal, SIG_DFL);
    return;
  }
  report(signal == SIGILL ? "a kernel used an address that is no multiple of what it read or wrote"
                          : "a kernel left its shared memory, its stack or its tensors");
  jump(scheduler);
}

// Handles faults while kernels run. It has a stack of its own, because the kernel's may be the one that overflowed.
class FaultHandler {
 public:
  FaultHandler() : memory_(4 * SIGSTKSZ) {
    stack_t mine = {};
    mine.ss_sp = memory_.data();
    mine.ss_size = memory_.size();
    sigaltstack(&mine, &stack_);
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int n = 0; n < kFaults; ++n) sigaction(kSignals[n], &action, &before_[n]);
  }
  ~FaultHandler() {
    for (int n = 0; n < kFaults; ++n) sigaction(kSignals[n], &before_[n], nullptr);
    sigaltstack(&stack_, nullptr);
    running = nullptr;
    current = nullptr;
  }

 private:
  // For a misaligned address the compiler emits a trap: see FLAGS in emulated.py.
  static constexpr int kFaults = 2, kSignals[kFaults] = {SIGSEGV, SIGILL};
  std::vector<unsigned char> memory_;
  stack_t stack_;
  struct sigaction before_[kFaults];
};

void throw_failure() {
  std::string what;
  failed = false;
  std::swap(what, failure);
  fibers.clear();  // some stopped in the middle of a kernel
  stacks.clear();
  STD_TORCH_CHECK(false, "emulator: ", what);
}

// Blocks [first, first + count) of a grid: a cluster, or all of it.
class Together {
 public:
  explicit Together(const Launch& launch)
      : threads_(static_cast<unsigned>(launch.threads)),
        cluster_(static_cast<unsigned>(launch.cluster)),
        count_(launch.cooperative ? static_cast<unsigned>(launch.grid) : cluster_),
        bytes_((launch.shared_bytes + 15) / 16 * 16),
        blocks_(count_),
        clusters_(count_ / cluster_),
        warps_(count_ * threads_ / 32) {
    for (unsigned n = 0; n < count_; ++n) memory_.push_back(std::make_unique<Guarded>(bytes_ + kCanary));
    group_.blocks = blocks_.data();
    group_.count = count_;
    group_.cluster = cluster_;
    group_.threads = threads_;
    group_.grid = static_cast<unsigned>(launch.grid);
    while (fibers.size() < count_ * threads_) {
      fibers.push_back(std::make_unique<Fiber>());
      stacks.push_back(fibers.back()->stack.begin());
    }
    std::sort(stacks.begin(), stacks.end());
  }

  void run(unsigned first) {
    start(first);
    int64_t left = static_cast<int64_t>(count_) * threads_;
    const int64_t warps = static_cast<int64_t>(warps_.size());
    while (left > 0) {
      bool moved = false;
      for (int64_t n = 0; n < warps; ++n) {
        while (run_warp(device().descending ? warps - 1 - n : n, left)) moved = true;
      }
      if (!moved && left > 0 && !async::land()) {
        report(async::lacks_registers() ? "a warp group waits for registers that no other gives back"
                                        : "threads wait for others that wait elsewhere or have returned");
        throw_failure();
      }
    }
    async::finish();
    if (failed) throw_failure();
    for (unsigned n = 0; n < count_; ++n) {
      for (const unsigned char* at = memory_[n]->end() - bytes_ - kCanary; at < memory_[n]->end() - bytes_; ++at) {
        STD_TORCH_CHECK(*at == 0xff, "emulator: a kernel wrote before its shared memory");
      }
    }
  }

 private:
  void start(unsigned first) {
    async::start(group_);
    async::next_group();
    crate_kernels::emulated::forget_copies();
    for (Cluster& cluster : clusters_) cluster = {{}, static_cast<int>(cluster_ * threads_)};
    for (unsigned n = 0; n < count_; ++n) {
      unsigned char* const shared = memory_[n]->end() - bytes_;
      std::memset(shared - kCanary, 0xff, bytes_ + kCanary);  // NaN in every format
      blocks_[n] = {
          first + n, n, n % cluster_, shared, bytes_, {}, static_cast<int>(threads_), {}, &clusters_[n / cluster_]};
    }
    for (Warp& warp : warps_) warp = {{}, {}, {}, nullptr, 32};
    stops_.assign(warps_.size(), {});
    for (unsigned n = 0; n < count_ * threads_; ++n) {
      Fiber& fiber = *fibers[n];
      fiber.thread = {&group_, &blocks_[n / threads_], &warps_[n / 32], n % threads_};
      fiber.done = false;
      fiber.waits = nullptr;
      fiber.until = nullptr;
    }
  }

  // Runs every lane that can run. Returns false if there was none.
  bool run_warp(int64_t warp, int64_t& left) {
    const Stop& stop = stops_[warp];
    if (stop.at != nullptr && stop.at->generation == stop.generation) return false;
    turn = {&fibers[warp * 32], device().descending, 0};
    bool moved = false;
    for (; turn.place < 32; ++turn.place) {
      Fiber& fiber = turn.lane();
      if (!runnable(fiber)) continue;
      moved = true;
      resume(fiber);
      if (failed) throw_failure();
      left -= running->done;
    }
    if (!moved) stops_[warp] = stop_of(warp);
    return moved;
  }

  // The one barrier that all lanes of a warp wait for that have not returned.
  struct Stop {
    const Barrier* at = nullptr;
    uint64_t generation = 0;
  };

  static Stop stop_of(int64_t warp) {
    static const Barrier nowhere;
    Stop found = {&nowhere, 0};
    for (int n = 0; n < 32; ++n) {
      const Fiber& fiber = *fibers[warp * 32 + n];
      if (fiber.done) continue;
      if (found.at == &nowhere) found = {fiber.waits, fiber.generation};
      if (found.at != fiber.waits || found.generation != fiber.generation) return {};
    }
    return found;
  }

  unsigned threads_, cluster_, count_;
  int64_t bytes_;
  std::vector<Block> blocks_;
  std::vector<Cluster> clusters_;
  std::vector<Warp> warps_;
  std::vector<Stop> stops_;
  std::vector<std::unique_ptr<Guarded>> memory_;
  Group group_;
};

}  // namespace

void fail(const char* what) {
  report(what);
  jump(scheduler);
}

bool on_stack(const void* at) {
  const auto* const byte = static_cast<const unsigned char*>(at);
  const auto next = std::upper_bound(stacks.begin(), stacks.end(), byte);
  return next != stacks.begin() && byte < next[-1] + kStack;
}

void report(const char* what) {
  failed = true;
  failure = what;
}

void wait_unordered(Barrier& barrier, int count) {
  wait(barrier, count);
}

void arrive_at(Barrier& barrier, int count) {
  async::arrived(barrier);
  ++barrier.arrived;
  leave(barrier, count);
}

void suspend_until(const std::function<bool()>& ready) {
  running->until = &ready;
  suspend();
}

void run(const Launch& launch, const std::function<void()>& kernel) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  const FaultHandler handler;
  body = &kernel;
  blockDim = dim3(static_cast<unsigned>(launch.threads));
  gridDim = dim3(static_cast<unsigned>(launch.grid));
  Together blocks(launch);
  async::forget_pages();
  const int64_t count = launch.cooperative ? launch.grid : launch.cluster;
  for (int64_t first = 0; first < launch.grid; first += count) blocks.run(static_cast<unsigned>(first));
}

}  // namespace emulator
