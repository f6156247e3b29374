// Plans: what an op does to tensors of one kind, recorded once by crate_kernels/_core/plan.py and repeated here.
//
// A plan belongs to a key: the number of a call's options, and the dtype, device, sizes, strides and alignment of every
// tensor. It allocates, fills the addresses into the parameters of its kernels and launches them through the driver. It
// never calls Python: where there is no plan, or a step fails, the results are undefined and Python takes the call.
#include "plan.h"

#include <dlfcn.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include "plan_driver.h"
#include "plan_program.h"
#include "plan_table.h"
#include "tensor.h"

namespace crate_kernels {
namespace {

std::map<std::string, Boxed, std::less<>>& kernels() {
  static std::map<std::string, Boxed, std::less<>> all;
  return all;
}

}  // namespace

Boxed offer(const char* name, Boxed kernel) {
  return kernels()[name] = kernel;
}

Boxed offered(const char* name) {
  const auto found = kernels().find(std::string_view(name));
  return found == kernels().end() ? nullptr : found->second;
}

namespace {

using torch::stable::Tensor;

PlanTable table;

[[maybe_unused]] const int at_fork =
    pthread_atfork([] { table.before_fork(); }, [] { table.after_fork(); }, [] { table.in_child(); });

std::atomic<int64_t> hits{0}, misses{0};

// ---- Running a plan. ----

class NoGrad {
 public:
  NoGrad() : was_(aoti_torch_grad_mode_is_enabled()) {
    if (was_) aoti_torch_grad_mode_set_enabled(false);
  }
  ~NoGrad() {
    if (was_) aoti_torch_grad_mode_set_enabled(true);
  }
  NoGrad(const NoGrad&) = delete;
  NoGrad& operator=(const NoGrad&) = delete;

 private:
  bool was_;
};

// The tensors of one run. Inputs are borrowed, the others owned.
class RunTensors {
 public:
  explicit RunTensors(int borrowed) : borrowed_(borrowed) {}
  ~RunTensors() {
    for (int i = borrowed_; i < count_; ++i) {
      if (tensors_[i] != nullptr) aoti_torch_delete_tensor_object(tensors_[i]);
    }
  }
  RunTensors(const RunTensors&) = delete;
  RunTensors& operator=(const RunTensors&) = delete;

  bool push(AtenTensorHandle t) {
    tensors_[count_] = t;
    return aoti_torch_get_data_ptr(t, &addresses_[count_++]) == 0;
  }
  AtenTensorHandle operator[](int i) const { return tensors_[i]; }
  char* address(int i) const { return static_cast<char*>(addresses_[i]); }
  // A handle that the caller owns.
  AtenTensorHandle copy(int i) const {
    AtenTensorHandle handle = nullptr;
    aoti_torch_new_tensor_handle(tensors_[i], &handle);
    return handle;
  }

 private:
  const int borrowed_;
  int count_ = 0;
  AtenTensorHandle tensors_[kMaxRegisters];
  void* addresses_[kMaxRegisters];
};

bool launch(const Launch& l, const RunTensors& registers, void* stream) {
  if (static_cast<uint64_t>(l.grid[0]) * l.grid[1] * l.grid[2] == 0) return true;
  alignas(64) unsigned char bytes[kMaxParameterBytes];
  void* parameters[kMaxParameters];
  std::memcpy(bytes, l.bytes.data(), l.bytes.size());
  for (const Address& a : l.addresses) {
    const char* const address = registers.address(a.of) + a.offset;
    std::memcpy(bytes + a.at, &address, sizeof(address));
  }
  for (size_t i = 0; i < l.places.size(); ++i) parameters[i] = bytes + l.places[i];
  Attribute attributes[4] = {};
  unsigned count = 0;
  const auto set = [&](int id, int value) {
    attributes[count].id = id;
    attributes[count++].value = value;
  };
  if (l.serialized) set(kSerialization, 1);
  if (l.cooperative) set(kCooperative, 1);
  if (l.ctas > 1) {
    set(kClusterSchedule, kSpread);
    attributes[count].id = kClusterSize;
    const unsigned sizes[3] = {l.ctas, 1, 1};
    std::memcpy(attributes[count++].cluster, sizes, sizeof(sizes));
  }
  const LaunchConfig config = {
      {l.grid[0] * l.ctas, l.grid[1], l.grid[2]}, {l.threads, 1, 1}, l.shared_bytes, stream, attributes, count};
  return driver().launch(&config, l.function, parameters, nullptr) == 0;
}

StableIValue bits_of(AtenTensorHandle handle) {
  StableIValue bits = 0;
  std::memcpy(&bits, &handle, sizeof(handle));
  return bits;
}

bool call_kernel(const Operation& o, const RunTensors& registers) {
  StableIValue stack[48];
  const size_t count = o.arguments.size();
  if (count > 48) return false;
  const auto some = [](StableIValue value) { return reinterpret_cast<StableIValue>(new StableIValue(value)); };
  for (size_t i = 0; i < count; ++i) {
    const Argument& a = o.arguments[i];
    const bool of_tensor = a.kind == Argument::kTensor || a.kind == Argument::kSomeTensor;
    const StableIValue value =
        of_tensor ? bits_of(registers.copy(static_cast<int>(a.value))) : static_cast<StableIValue>(a.value);
    const bool optional = a.kind == Argument::kSomeTensor || a.kind == Argument::kSomeValue;
    stack[i] = a.kind == Argument::kNone ? 0 : optional ? some(value) : value;
  }
  if (o.kernel != nullptr) {
    o.kernel(stack, count, 0);
    return true;
  }
  const std::string name = "crate_kernels_C::" + o.name;
  return torch_call_dispatcher(name.c_str(), "", stack, TORCH_ABI_VERSION) == 0;
}

AtenTensorHandle sum(const Operation& o, const RunTensors& registers) {
  using torch::stable::detail::from;
  StableIValue stack[4] = {bits_of(registers.copy(o.operands[0])), from(std::optional<std::vector<int64_t>>(o.dims)),
                           from(false), from(std::nullopt)};
  if (torch_call_dispatcher("aten::sum", "dim_IntList", stack, TORCH_ABI_VERSION) != 0) return nullptr;
  AtenTensorHandle result;
  std::memcpy(&result, &stack[0], sizeof(result));
  return result;
}

bool run(const Operation& o, const Library& library, RunTensors& registers) {
  const auto at = [&](int i) { return registers[o.operands[i]]; };
  AtenTensorHandle made = nullptr;
  switch (o.kind) {
    case Operation::kKernel:
      return call_kernel(o, registers);
    case Operation::kAddmm:
      return library.addmm != nullptr && library.addmm(at(0), at(1), at(2), at(3), o.beta, o.alpha) == 0;
    case Operation::kMm:
      return library.mm != nullptr && library.mm(at(0), at(1), at(2)) == 0;
    case Operation::kCopy:
      return aoti_torch_copy_(at(0), at(1), 0) == 0;
    case Operation::kZero:
      return aoti_torch_zero_(at(0)) == 0;
    case Operation::kSum:
      made = sum(o, registers);
      break;
    case Operation::kAdd:
      if (library.add == nullptr || library.add(at(0), at(1), o.alpha, &made) != 0) return false;
      break;
    case Operation::kMul:
      if (library.mul == nullptr || library.mul(at(0), o.alpha, &made) != 0) return false;
      break;
    case Operation::kView:
      if (aoti_torch__reinterpret_tensor(at(0), static_cast<int64_t>(o.dims.size()), o.dims.data(), o.strides.data(),
                                         o.offset, &made) != 0) {
        return false;
      }
      break;
  }
  return made != nullptr && registers.push(made);
}

// Runs a plan on the tensors of a call and returns handles of its first results; false: nothing is returned.
bool run(const Plan& p, const AtenTensorHandle* inputs, int count, AtenTensorHandle* results, int wanted) {
  RunTensors registers(count);
  for (int i = 0; i < count; ++i) {
    if (!registers.push(inputs[i])) return false;
  }
  static const int32_t cpu = aoti_torch_device_type_cpu();
  int32_t type = 0, index = 0;
  aoti_torch_get_device_type(inputs[0], &type);
  aoti_torch_get_device_index(inputs[0], &index);
  const NoGrad no_grad;
  Current current;
  void* stream = nullptr;
  if (!p.launches.empty()) {
    const Driver& d = driver();
    if (type != cpu && !(current.set(d, index) && ensure_context(d, index))) return false;
    if (d.stream != nullptr && d.stream(index, &stream) != 0) return false;
  }
  AtenTensorHandle made = nullptr;
  for (const Allocation& a : p.allocations) {
    if (aoti_torch_empty_strided(static_cast<int64_t>(a.sizes.size()), a.sizes.data(), a.strides.data(), a.dtype, type,
                                 index, &made) != 0 ||
        !registers.push(made)) {
      return false;
    }
  }
  if (p.scratch_bytes > 0) {
    const int64_t one = 1;
    if (aoti_torch_empty_strided(1, &p.scratch_bytes, &one, aoti_torch_dtype_uint8(), type, index, &made) != 0 ||
        !registers.push(made)) {
      return false;
    }
  }
  const Library& torch = library(type == cpu);
  auto next_launch = p.launches.begin();
  auto next_operation = p.operations.begin();
  for (const bool is_launch : p.is_launch) {
    if (is_launch ? !launch(*next_launch++, registers, stream) : !run(*next_operation++, torch, registers)) {
      return false;
    }
  }
  for (int i = 0; i < wanted; ++i) results[i] = registers.copy(p.results[i]);
  return true;
}

// ---- The ops. ----

// (tensors, the number of the options) -> the plan's first results; undefined where no plan could run.
template <int TENSORS, int RESULTS>
void run_op(StableIValue* stack, uint64_t, uint64_t) {
  AtenTensorHandle tensors[TENSORS], results[RESULTS] = {};
  PlanKey key(static_cast<int64_t>(stack[TENSORS]));
  for (int i = 0; i < TENSORS; ++i) {
    std::memcpy(&tensors[i], &stack[i], sizeof(tensors[i]));
    key.tensor(tensors[i]);
  }
  bool ran = false;
  if (const auto plan = key.whole ? table.find(key) : nullptr; plan != nullptr && plan->results.size() >= RESULTS) {
    try {
      ran = run(*plan, tensors, TENSORS, results, RESULTS);
    } catch (const std::exception&) {
      // Python makes the same call and raises what it raises.
    }
  }
  (ran ? hits : misses).fetch_add(1, std::memory_order_relaxed);
  for (AtenTensorHandle& result : results) {
    if (!ran) aoti_torch_new_uninitialized_tensor(&result);
  }
  for (const AtenTensorHandle tensor : tensors) aoti_torch_delete_tensor_object(tensor);
  for (int i = 0; i < RESULTS; ++i) stack[i] = bits_of(results[i]);
}

PlanKey key_of(const std::vector<Tensor>& tensors, int64_t number) {
  PlanKey key(number);
  for (const Tensor& t : tensors) key.tensor(t.get());
  return key;
}

bool meet(std::vector<Tensor> tensors, int64_t number) {
  const PlanKey key = key_of(tensors, number);
  return key.whole && table.meet(key);
}

void store(std::vector<Tensor> tensors, int64_t number, std::vector<int64_t> words) {
  const PlanKey key = key_of(tensors, number);
  if (key.whole) table.put(key, read_plan(words, static_cast<int>(tensors.size())));
}

void forget() {
  table.clear();
}

std::vector<int64_t> counts() {
  return {hits, misses, static_cast<int64_t>(table.size())};
}

// Addresses of functions with the signatures of `Driver`, in its order; without any, CUDA's own driver again.
void drive_by(std::vector<int64_t> functions) {
  table.clear();
  stand_in.reset();
  if (functions.empty()) return;
  Driver d;
  auto take = [&, next = size_t{0}](auto& function) mutable {
    const int64_t address = next < functions.size() ? functions[next++] : 0;
    function = reinterpret_cast<std::decay_t<decltype(function)>>(address);
  };
  take(d.launch), take(d.stream), take(d.parameter), take(d.get_context), take(d.set_context), take(d.retain_context);
  take(d.create_guard), take(d.delete_guard);
  stand_in = d;
}

constexpr int kMaxTensors = 9, kMaxResults = 5;

std::string name_of(int tensors, int results) {
  return "plan_" + std::to_string(tensors) + "_" + std::to_string(results);
}

std::string schema_of(int tensors, int results) {
  std::string schema = name_of(tensors, results) + "(";
  for (int i = 0; i < tensors; ++i) schema += "Tensor t" + std::to_string(i) + ", ";
  schema += "int number) -> ";
  std::string list = "Tensor";
  for (int i = 1; i < results; ++i) list += ", Tensor";
  return schema + (results == 1 ? list : "(" + list + ")");
}

template <int... I>
void define(torch::stable::detail::StableLibrary& m, std::integer_sequence<int, I...>) {
  (m.def(schema_of(I / kMaxResults + 1, I % kMaxResults + 1).c_str()), ...);
}

template <int... I>
void implement(torch::stable::detail::StableLibrary& m, std::integer_sequence<int, I...>) {
  (m.impl(name_of(I / kMaxResults + 1, I % kMaxResults + 1).c_str(), &run_op<I / kMaxResults + 1, I % kMaxResults + 1>),
   ...);
}

using Forms = std::make_integer_sequence<int, kMaxTensors * kMaxResults>;

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(crate_kernels_C, m) {
  define(m, Forms());
  m.def("plan_meet(Tensor[] tensors, int number) -> bool");
  m.def("plan_store(Tensor[] tensors, int number, int[] words) -> ()");
  m.def("plan_forget() -> ()");
  m.def("plan_counts() -> int[]");
  m.def("plan_drive_by(int[] functions) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(crate_kernels_C, CompositeExplicitAutograd, m) {
  implement(m, Forms());
  m.impl("plan_meet", TORCH_BOX(&meet));
  m.impl("plan_store", TORCH_BOX(&store));
  m.impl("plan_forget", TORCH_BOX(&forget));
  m.impl("plan_counts", TORCH_BOX(&counts));
  m.impl("plan_drive_by", TORCH_BOX(&drive_by));
}

}  // namespace crate_kernels
