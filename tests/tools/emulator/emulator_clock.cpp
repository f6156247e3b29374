// The functions of emulator_clock.h.
#include "emulator_clock.h"

#include <algorithm>
#include <array>

#include "emulator_numbers.h"

namespace emulator::async {
namespace {

void raise(Known& known, const Known& other) {
  take_larger(known.seen.data(), other.seen.data(), known.seen.size());
  take_larger(known.fenced.data(), other.fenced.data(), known.fenced.size());
}

// What two know together. Threads that wait for one barrier ask for the same two.
Shared together(const Shared& a, const Shared& b) {
  static std::array<std::array<Shared, 3>, 8> last;
  static size_t next = 0;
  for (const auto& [x, y, both] : last) {
    if (x == a && y == b) return both;
  }
  const auto both = std::make_shared<Known>(*a);
  raise(*both, *b);
  last[next++ % last.size()] = {a, b, both};
  return both;
}

}  // namespace

void Clock::join(const Gathered& others) {
  if (others.known_ == nullptr) return;
  known_ = others.includes(known_) ? Shared(others.known_) : together(known_, others.known_);
}

Clock common(const Clock* const (&clocks)[4]) {
  const Clock& first = *clocks[0];
  const auto shares = [&](const Clock* clock) { return clock->known_ == first.known_; };
  // A thread knows more of itself than the others do.
  if (std::all_of(clocks, clocks + 4, shares)) return Clock(first.known_, -1);
  const auto all = std::make_shared<Known>(*first.known_);
  for (size_t n = 0; n < all->seen.size(); ++n) {
    all->seen[n] = first.seen(static_cast<int>(n));
    all->fenced[n] = first.fenced(static_cast<int>(n));
    for (const Clock* clock : clocks) {
      all->seen[n] = std::min(all->seen[n], clock->seen(static_cast<int>(n)));
      all->fenced[n] = std::min(all->fenced[n], clock->fenced(static_cast<int>(n)));
    }
  }
  return Clock(all, -1);
}

bool Gathered::includes(const Shared& known) const {
  return std::find(included_.begin(), included_.end(), known) != included_.end();
}

void Gathered::add(const Clock& clock) {
  if (known_ == nullptr) {
    known_ = std::make_shared<Known>(*clock.known_);
    included_ = {clock.known_};
  } else if (!includes(clock.known_)) {
    raise(*known_, *clock.known_);
    included_.push_back(clock.known_);
  }
  const int n = clock.thread_;
  known_->seen[n] = std::max(known_->seen[n], clock.seen_);
  known_->fenced[n] = std::max(known_->fenced[n], clock.fenced_);
}

void Gathered::add(int engine, Step seen) {
  if (known_ == nullptr) {
    known_ = std::make_shared<Known>();
    known_->seen.resize(engine + 1);  // it is the last
    known_->fenced.resize(engine + 1);
  }
  known_->seen[engine] = std::max(known_->seen[engine], seen);
}

}  // namespace emulator::async
