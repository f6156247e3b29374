// A plan, and how it is read.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <torch/headeronly/util/Exception.h>

#include "plan.h"
#include "plan_driver.h"

namespace crate_kernels {
namespace {

constexpr int kMaxRegisters = 64, kMaxParameters = 256;
constexpr size_t kMaxParameterBytes = 4096;  // what CUDA passes to a kernel on every GPU

// ---- Plans. Registers hold a call's tensors, then allocations, scratch memory, and what the steps make. ----

struct Allocation {
  int32_t dtype;
  std::vector<int64_t> sizes, strides;
};

struct Address {
  int of;
  size_t at;       // byte of the parameters that gets it
  int64_t offset;  // bytes
};

struct Launch {
  void* function;
  unsigned grid[3], threads, shared_bytes, ctas;
  bool cooperative, serialized;
  std::vector<int64_t> places;  // where each parameter begins among the bytes
  std::vector<unsigned char> bytes;
  std::vector<Address> addresses;
};

// An argument of a library's op or of a kernel of ours.
struct Argument {
  enum Kind : int64_t { kTensor, kSomeTensor, kNone, kValue, kSomeValue } kind;
  int64_t value;  // a register, or the bits of a number
};

// What PyTorch does. Sums and what follows them here are new tensors, in the registers that follow.
struct Operation {
  enum Kind : int64_t { kKernel, kAddmm, kMm, kCopy, kZero, kSum, kAdd, kMul, kView } kind;
  std::string name;
  Boxed kernel = nullptr;  // null: by the dispatcher
  std::vector<Argument> arguments;
  std::vector<int> operands;  // registers; the first is written, where no tensor is made
  std::vector<int64_t> dims;  // of a sum; sizes of a view
  std::vector<int64_t> strides;
  int64_t offset = 0;  // elements from the first of what is viewed
  double beta = 0, alpha = 0;

  bool makes_tensor() const { return kind >= kSum; }
};

struct Plan {
  std::vector<uint64_t> key;
  std::vector<Allocation> allocations;
  int64_t scratch_bytes = 0;
  std::vector<Launch> launches;
  std::vector<Operation> operations;
  std::vector<bool> is_launch;  // of each step, in order
  std::vector<int> results;
};

// ---- Reading a plan. crate_kernels/_core/recording.py writes it as whole numbers, in this order. ----

class Reader {
 public:
  explicit Reader(const std::vector<int64_t>& words) : words_(words) {}

  int64_t number() {
    STD_TORCH_CHECK(at_ < words_.size(), "a plan ends early, after ", words_.size(), " numbers");
    return words_[at_++];
  }
  int64_t within(int64_t end, const char* what) {
    const int64_t value = number();
    STD_TORCH_CHECK(0 <= value && value < end, what, " must be from 0 to ", end - 1, ", got ", value);
    return value;
  }
  double real() {
    const int64_t bits = number();
    double value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }
  std::vector<int64_t> list() {
    const int64_t count = within(static_cast<int64_t>(words_.size()), "a count");
    std::vector<int64_t> values(count);
    for (int64_t& value : values) value = number();
    return values;
  }
  template <class Item>
  void each(Item item) {
    for (int64_t left = within(static_cast<int64_t>(words_.size()), "a count"); left > 0; --left) item();
  }
  bool done() const { return at_ == words_.size(); }

 private:
  const std::vector<int64_t>& words_;
  size_t at_ = 0;
};

Launch read_launch(Reader& r, int registers) {
  Launch l = {};
  l.function = reinterpret_cast<void*>(r.number());
  for (unsigned& size : l.grid) size = static_cast<unsigned>(r.number());
  l.threads = static_cast<unsigned>(r.number());
  l.shared_bytes = static_cast<unsigned>(r.number());
  l.ctas = static_cast<unsigned>(r.number());
  l.cooperative = r.number() != 0;
  l.serialized = r.number() != 0;
  l.places = r.list();
  const std::vector<int64_t> words = r.list(), sizes = r.list();
  l.bytes.resize(words.size() * sizeof(int64_t));
  std::memcpy(l.bytes.data(), words.data(), l.bytes.size());
  STD_TORCH_CHECK(
      l.bytes.size() <= kMaxParameterBytes && l.places.size() <= kMaxParameters && l.places.size() == sizes.size(),
      "a launch has ", l.bytes.size(), " bytes in ", l.places.size(), " parameters");
  for (size_t i = 0; i < sizes.size(); ++i) {
    STD_TORCH_CHECK(l.places[i] >= 0 && sizes[i] > 0 && l.places[i] + sizes[i] <= static_cast<int64_t>(l.bytes.size()),
                    "parameter ", i, " of ", sizes[i], " bytes is at byte ", l.places[i], " of ", l.bytes.size());
  }
  r.each([&] {
    Address a;
    a.of = static_cast<int>(r.within(registers, "a register"));
    a.at = static_cast<size_t>(r.within(static_cast<int64_t>(l.bytes.size()) - 7, "the byte of an address"));
    a.offset = r.number();
    l.addresses.push_back(a);
  });
  // What the driver knows of the function must be what is passed to it.
  const Driver& d = driver();
  STD_TORCH_CHECK(d.launch != nullptr, "there is no CUDA driver to launch with");
  for (size_t i = 0, offset = 0, size = 0; d.parameter != nullptr && i <= sizes.size(); ++i) {
    const bool there = d.parameter(l.function, i, &offset, &size) == 0;
    STD_TORCH_CHECK(there == (i < sizes.size()), "a kernel of the driver has ", there ? "more" : "fewer",
                    " parameters than the ", sizes.size(), " of its launch");
    STD_TORCH_CHECK(!there || size == static_cast<size_t>(sizes[i]), "parameter ", i, " of a kernel has ", size,
                    " bytes, its launch ", sizes[i]);
  }
  return l;
}

Operation read_operation(Reader& r, int registers) {
  Operation o = {};
  const auto read_register = [&] { return static_cast<int>(r.within(registers, "a register")); };
  o.kind = static_cast<Operation::Kind>(r.within(Operation::kView + 1, "the kind of an operation"));
  if (o.kind == Operation::kKernel) {
    for (const int64_t letter : r.list()) o.name.push_back(static_cast<char>(letter));
    o.kernel = offered(o.name.c_str());
    r.each([&] {
      Argument a;
      a.kind = static_cast<Argument::Kind>(r.within(Argument::kSomeValue + 1, "the kind of an argument"));
      a.value = a.kind <= Argument::kSomeTensor ? read_register() : r.number();
      o.arguments.push_back(a);
    });
    return o;
  }
  constexpr int kOperands[] = {0, 4, 3, 2, 1, 1, 2, 1, 1};
  for (int i = 0; i < kOperands[o.kind]; ++i) o.operands.push_back(read_register());
  if (o.kind == Operation::kAddmm) o.beta = r.real();
  if (o.kind == Operation::kAddmm || o.kind == Operation::kAdd || o.kind == Operation::kMul) o.alpha = r.real();
  if (o.kind == Operation::kSum || o.kind == Operation::kView) o.dims = r.list();
  if (o.kind == Operation::kView) {
    o.strides = r.list();
    o.offset = r.number();
    STD_TORCH_CHECK(o.dims.size() == o.strides.size(), "a view has ", o.dims.size(), " sizes and ", o.strides.size(),
                    " strides");
  }
  return o;
}

std::shared_ptr<Plan> read_plan(const std::vector<int64_t>& words, int inputs) {
  Reader r(words);
  auto p = std::make_shared<Plan>();
  int registers = inputs;
  r.each([&] {
    Allocation a;
    a.dtype = static_cast<int32_t>(r.number());
    a.sizes = r.list();
    a.strides = r.list();
    STD_TORCH_CHECK(a.sizes.size() == a.strides.size(), "an allocation has ", a.sizes.size(), " sizes and ",
                    a.strides.size(), " strides");
    p->allocations.push_back(std::move(a));
    ++registers;
  });
  p->scratch_bytes = r.number();
  registers += p->scratch_bytes > 0;
  r.each([&] {
    p->is_launch.push_back(r.number() != 0);
    if (p->is_launch.back()) {
      p->launches.push_back(read_launch(r, registers));
    } else {
      p->operations.push_back(read_operation(r, registers));
      registers += p->operations.back().makes_tensor();
    }
  });
  r.each([&] { p->results.push_back(static_cast<int>(r.within(registers, "a register"))); });
  STD_TORCH_CHECK(r.done(), "a plan has numbers after its end");
  STD_TORCH_CHECK(registers <= kMaxRegisters, "a plan has ", registers, " tensors, more than ", kMaxRegisters);
  return p;
}

}  // namespace
}  // namespace crate_kernels
