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
#include <new>
#include <optional>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

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

constexpr size_t kMostPlans = 4096, kMostSeen = 65536;
constexpr int kMostRegisters = 64, kMostParameters = 256, kMostKeyWords = 160;
constexpr size_t kMostParameterBytes = 4096;  // what CUDA passes to a kernel on every GPU

// ---- The driver: as much of cuda.h as a launch takes. ----

struct Attribute {
  int id, pad;
  union {
    char bytes[64];
    unsigned cluster[3];
    int value;
  };
};
enum : int { kCooperative = 2, kClusterSize = 4, kClusterSchedule = 5, kSerialization = 6, kSpread = 1 };

struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  Attribute* attributes;
  unsigned count;
};
static_assert(sizeof(LaunchConfig) == 56 && sizeof(Attribute) == 72, "as CUlaunchConfig and CUlaunchAttribute");

struct Driver {
  int (*launch)(const LaunchConfig*, void* function, void** parameters, void** extra) = nullptr;
  // The stream of PyTorch on a device; null where there is no such device: launches are then given no stream.
  int (*stream)(int32_t device, void** stream) = nullptr;
  // Offset and size of a parameter of a function, an error beyond the last; null: an older driver.
  int (*parameter)(void* function, size_t index, size_t* offset, size_t* size) = nullptr;
  int (*get_context)(void** context) = nullptr;
  int (*set_context)(void* context) = nullptr;
  int (*retain_context)(void** context, int device) = nullptr;
};

template <class Function>
void find(void* library, const char* name, Function& function) {
  function = library == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(library, name));
}

Driver cuda_driver() {
  Driver found;
  void* const cuda = dlopen("libcuda.so.1", RTLD_NOW);
  find(cuda, "cuLaunchKernelEx", found.launch);
  find(cuda, "cuFuncGetParamInfo", found.parameter);
  find(cuda, "cuCtxGetCurrent", found.get_context);
  find(cuda, "cuCtxSetCurrent", found.set_context);
  find(cuda, "cuDevicePrimaryCtxRetain", found.retain_context);
  find(dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD), "aoti_torch_get_current_cuda_stream", found.stream);
  return found;
}

// Another driver than CUDA's, for tests and for measuring the host.
std::optional<Driver> stand_in;

const Driver& driver() {
  static const Driver cuda = cuda_driver();
  return stand_in ? *stand_in : cuda;
}

// A thread of autograd may have no context yet; kernels run in the primary one of their device.
bool ensure_context(const Driver& d, int32_t device) {
  void* context = nullptr;
  if (d.get_context == nullptr || (d.get_context(&context) == 0 && context != nullptr)) return true;
  return d.retain_context(&context, device) == 0 && d.set_context(context) == 0;
}

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

// PyTorch's arithmetic on one type of device. Its functions have no names in the stable ABI's headers, and
// are looked up; null: this PyTorch has no such function.
struct Library {
  int (*addmm)(AtenTensorHandle out, AtenTensorHandle base, AtenTensorHandle left, AtenTensorHandle right, double beta,
               double alpha) = nullptr;
  int (*mm)(AtenTensorHandle out, AtenTensorHandle left, AtenTensorHandle right) = nullptr;
  int (*add)(AtenTensorHandle left, AtenTensorHandle right, double alpha, AtenTensorHandle* result) = nullptr;
  int (*mul)(AtenTensorHandle left, double right, AtenTensorHandle* result) = nullptr;
};

Library library_of(const std::string& device) {
  Library found;
  void* const torch = dlopen(("libtorch_" + device + ".so").c_str(), RTLD_NOW | RTLD_NOLOAD);
  const std::string prefix = "aoti_torch_" + device;
  find(torch, (prefix + "_addmm_out").c_str(), found.addmm);
  find(torch, (prefix + "_mm_out").c_str(), found.mm);
  find(torch, (prefix + "_add_Tensor").c_str(), found.add);
  find(torch, (prefix + "_mul_Scalar").c_str(), found.mul);
  return found;
}

const Library& library(bool cpu) {
  static const Library on_cpu = library_of("cpu"), on_cuda = library_of("cuda");
  return cpu ? on_cpu : on_cuda;
}

struct Plan {
  std::vector<uint64_t> key;
  std::vector<Allocation> allocations;
  int64_t scratch_bytes = 0;
  std::vector<Launch> launches;
  std::vector<Operation> operations;
  std::vector<bool> is_launch;  // of each step, in order
  std::vector<int> results;
  int registers = 0;
};

uint64_t mix(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * 0x9E3779B97F4A7C15ull;
  return hash ^ (hash >> 29);
}

// What decides which kernels a call launches with which parameters.
struct Key {
  std::array<uint64_t, kMostKeyWords> words;
  int count = 0;
  uint64_t hash = 0xCBF29CE484222325ull;
  bool whole = true;  // false: a tensor that has no key

  explicit Key(int64_t number) {
    add(static_cast<uint64_t>(number));
    add(stand_in ? 1 : 0);
  }

  void add(uint64_t word) {
    if (count == kMostKeyWords) {
      whole = false;
      return;
    }
    words[count++] = word;
    hash = mix(hash, word);
  }

  void tensor(AtenTensorHandle t) {
    static const int32_t strided = aoti_torch_layout_strided();
    int32_t layout = 0, dtype = 0, type = 0, index = 0;
    int64_t dims = 0, *sizes = nullptr, *strides = nullptr;
    void* data = nullptr;
    if (aoti_torch_get_layout(t, &layout) != 0 || layout != strided || aoti_torch_get_dim(t, &dims) != 0 ||
        aoti_torch_get_sizes(t, &sizes) != 0 || aoti_torch_get_strides(t, &strides) != 0 ||
        aoti_torch_get_dtype(t, &dtype) != 0 || aoti_torch_get_device_type(t, &type) != 0 ||
        aoti_torch_get_device_index(t, &index) != 0 || aoti_torch_get_data_ptr(t, &data) != 0) {
      whole = false;
      return;
    }
    const uint64_t aligned = reinterpret_cast<uintptr_t>(data) % 16 == 0;
    // Threads of the CPU decide what Python chooses there.
    const uint64_t threads = type == 0 ? torch::stable::get_num_threads() : 0;
    add(static_cast<uint64_t>(dims) | static_cast<uint64_t>(dtype) << 8 | static_cast<uint64_t>(type) << 16 |
        static_cast<uint64_t>(index & 255) << 24 | aligned << 32 | threads << 40);
    for (int64_t d = 0; d < dims; ++d) {
      add(static_cast<uint64_t>(sizes[d]));
      add(static_cast<uint64_t>(strides[d]));
    }
  }
};

class Table {
 public:
  std::shared_ptr<const Plan> find(const Key& key) const {
    std::shared_lock hold(lock_);
    for (auto [at, end] = plans_.equal_range(key.hash); at != end; ++at) {
      const std::vector<uint64_t>& words = at->second->key;
      if (words.size() == static_cast<size_t>(key.count) &&
          std::memcmp(words.data(), key.words.data(), words.size() * sizeof(uint64_t)) == 0) {
        return at->second;
      }
    }
    return nullptr;
  }

  // Returns whether a key was met before. Two keys of one hash only record a plan early.
  bool meet(const Key& key) {
    std::unique_lock hold(lock_);
    if (seen_.size() >= kMostSeen) seen_.clear();
    return !seen_.insert(key.hash).second;
  }

  void put(const Key& key, std::shared_ptr<Plan> plan) {
    plan->key.assign(key.words.begin(), key.words.begin() + key.count);
    std::unique_lock hold(lock_);
    for (auto [at, end] = plans_.equal_range(key.hash); at != end; ++at) {
      if (at->second->key == plan->key) return;
    }
    if (plans_.size() >= kMostPlans) plans_.clear();
    plans_.emplace(key.hash, std::move(plan));
  }

  void clear() {
    std::unique_lock hold(lock_);
    plans_.clear();
    seen_.clear();
  }

  size_t size() const {
    std::shared_lock hold(lock_);
    return plans_.size();
  }

  // A fork copies the lock as another thread may hold it, and not that thread: its child would wait for ever.
  void before_fork() { lock_.lock(); }
  void after_fork() { lock_.unlock(); }
  void in_child() { new (&lock_) std::shared_mutex; }

 private:
  mutable std::shared_mutex lock_;
  std::unordered_multimap<uint64_t, std::shared_ptr<const Plan>> plans_;
  std::unordered_set<uint64_t> seen_;
} table;

[[maybe_unused]] const int at_fork =
    pthread_atfork([] { table.before_fork(); }, [] { table.after_fork(); }, [] { table.in_child(); });

std::atomic<int64_t> hits{0}, misses{0};

// ---- Reading a plan. plan.py writes it as whole numbers, in this order. ----

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
      l.bytes.size() <= kMostParameterBytes && l.places.size() <= kMostParameters && l.places.size() == sizes.size(),
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
  STD_TORCH_CHECK(r.done(), "a plan goes on after its end");
  STD_TORCH_CHECK(registers <= kMostRegisters, "a plan has ", registers, " tensors, more than ", kMostRegisters);
  p->registers = registers;
  return p;
}

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
class Registers {
 public:
  explicit Registers(int borrowed) : borrowed_(borrowed) {}
  ~Registers() {
    for (int i = borrowed_; i < count_; ++i) {
      if (tensors_[i] != nullptr) aoti_torch_delete_tensor_object(tensors_[i]);
    }
  }
  Registers(const Registers&) = delete;
  Registers& operator=(const Registers&) = delete;

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
  AtenTensorHandle tensors_[kMostRegisters];
  void* addresses_[kMostRegisters];
};

bool launch(const Launch& l, const Registers& registers, void* stream) {
  if (static_cast<uint64_t>(l.grid[0]) * l.grid[1] * l.grid[2] == 0) return true;
  alignas(64) unsigned char bytes[kMostParameterBytes];
  void* parameters[kMostParameters];
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

bool call_kernel(const Operation& o, const Registers& registers) {
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

AtenTensorHandle sum(const Operation& o, const Registers& registers) {
  using torch::stable::detail::from;
  StableIValue stack[4] = {bits_of(registers.copy(o.operands[0])), from(std::optional<std::vector<int64_t>>(o.dims)),
                           from(false), from(std::nullopt)};
  if (torch_call_dispatcher("aten::sum", "dim_IntList", stack, TORCH_ABI_VERSION) != 0) return nullptr;
  AtenTensorHandle result;
  std::memcpy(&result, &stack[0], sizeof(result));
  return result;
}

bool run(const Operation& o, const Library& library, Registers& registers) {
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

// Runs a plan on the tensors of a call and gives handles of its results; false: nothing is given.
bool run(const Plan& p, const AtenTensorHandle* inputs, int count, AtenTensorHandle* results) {
  Registers registers(count);
  for (int i = 0; i < count; ++i) {
    if (!registers.push(inputs[i])) return false;
  }
  static const int32_t cpu = aoti_torch_device_type_cpu();
  int32_t type = 0, index = 0;
  aoti_torch_get_device_type(inputs[0], &type);
  aoti_torch_get_device_index(inputs[0], &index);
  const NoGrad no_grad;
  std::optional<torch::stable::accelerator::DeviceGuard> guard;
  void* stream = nullptr;
  if (!p.launches.empty()) {
    const Driver& d = driver();
    if (type != cpu) {
      guard.emplace(index);
      if (!ensure_context(d, index)) return false;
    }
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
  for (size_t i = 0; i < p.results.size(); ++i) results[i] = registers.copy(p.results[i]);
  return true;
}

// ---- The ops. ----

// (tensors, the number of the options) -> results; undefined where no plan could run.
template <int TENSORS, int RESULTS>
void run_op(StableIValue* stack, uint64_t, uint64_t) {
  AtenTensorHandle tensors[TENSORS], results[RESULTS] = {};
  Key key(static_cast<int64_t>(stack[TENSORS]));
  for (int i = 0; i < TENSORS; ++i) {
    std::memcpy(&tensors[i], &stack[i], sizeof(tensors[i]));
    key.tensor(tensors[i]);
  }
  bool ran = false;
  if (const auto plan = key.whole ? table.find(key) : nullptr; plan != nullptr && plan->results.size() == RESULTS) {
    try {
      ran = run(*plan, tensors, TENSORS, results);
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

Key key_of(const std::vector<Tensor>& tensors, int64_t number) {
  Key key(number);
  for (const Tensor& t : tensors) key.tensor(t.get());
  return key;
}

bool meet(std::vector<Tensor> tensors, int64_t number) {
  const Key key = key_of(tensors, number);
  return key.whole && table.meet(key);
}

void store(std::vector<Tensor> tensors, int64_t number, std::vector<int64_t> words) {
  const Key key = key_of(tensors, number);
  if (key.whole) table.put(key, read_plan(words, static_cast<int>(tensors.size())));
}

void forget() {
  table.clear();
}

std::vector<int64_t> counts() {
  return {hits, misses, static_cast<int64_t>(table.size())};
}

// Addresses of functions with the signatures of `Driver`; of `launch` 0: CUDA's own driver again.
void drive_by(int64_t launch, int64_t stream, int64_t parameter) {
  table.clear();
  stand_in.reset();
  if (launch == 0) return;
  stand_in.emplace();
  stand_in->launch = reinterpret_cast<decltype(stand_in->launch)>(launch);
  stand_in->stream = reinterpret_cast<decltype(stand_in->stream)>(stream);
  stand_in->parameter = reinterpret_cast<decltype(stand_in->parameter)>(parameter);
}

constexpr int kMostTensors = 9, kMostResults = 5;

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
  (m.def(schema_of(I / kMostResults + 1, I % kMostResults + 1).c_str()), ...);
}

template <int... I>
void implement(torch::stable::detail::StableLibrary& m, std::integer_sequence<int, I...>) {
  (m.impl(name_of(I / kMostResults + 1, I % kMostResults + 1).c_str(),
          &run_op<I / kMostResults + 1, I % kMostResults + 1>),
   ...);
}

using Forms = std::make_integer_sequence<int, kMostTensors * kMostResults>;

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(crate_kernels_C, m) {
  define(m, Forms());
  m.def("plan_meet(Tensor[] tensors, int number) -> bool");
  m.def("plan_store(Tensor[] tensors, int number, int[] words) -> ()");
  m.def("plan_forget() -> ()");
  m.def("plan_counts() -> int[]");
  m.def("plan_drive_by(int launch, int stream, int parameter) -> ()");
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
