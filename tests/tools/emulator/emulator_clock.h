// Vector clocks: what each thread of a launch knows of the others. Threads that a barrier has ordered share what they
// know, so that a barrier costs one clock, not one a thread.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace emulator::async {

using Step = uint32_t;

// Of each thread, and of the engine that copies, the last step that it is ordered behind, and the step of the last
// proxy fence. Steps begin at 1.
struct Known {
  std::vector<Step> seen, fenced;
};
using Shared = std::shared_ptr<const Known>;

class Gathered;

// What a thread knows: what it shares, and its own steps.
class Clock {
 public:
  Clock() = default;
  Clock(Shared known, int thread) : known_(std::move(known)), thread_(thread) {}

  Step seen(int n) const { return n == thread_ ? seen_ : known_->seen[n]; }
  Step fenced(int n) const { return n == thread_ ? fenced_ : known_->fenced[n]; }
  void step() { ++seen_; }
  void fence() { fenced_ = seen_; }
  // The thread is ordered behind those who came to a barrier.
  void join(const Gathered& others);

 private:
  friend class Gathered;
  friend Clock common(const Clock* const (&clocks)[4]);

  Shared known_;
  int thread_ = -1;  // none
  Step seen_ = 1, fenced_ = 0;
};

// What all four know.
Clock common(const Clock* const (&clocks)[4]);

// What those know together who came to a barrier.
class Gathered {
 public:
  void add(const Clock& clock);
  // Of the engine, which is the last number.
  void add(int engine, Step seen);

 private:
  friend class Clock;

  bool includes(const Shared& known) const;

  std::shared_ptr<Known> known_;
  std::vector<Shared> included_;
};

}  // namespace emulator::async
