// A product by cuBLASLt: out = base + scale * left @ right, zero where a gate is closed, rounded once. PyTorch's own
// products copy the addend into the result first, and have no gate. The library is the one that PyTorch has loaded;
// what it chose for a shape is kept.
#include <dlfcn.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "box.h"
#include "plan.h"
#include "tensor.h"

namespace crate_kernels {
namespace {

// ---- As much of cublasLt.h as a product takes. ----

struct LtAlgorithm {
  uint64_t data[8];
};
struct LtHeuristic {
  LtAlgorithm algorithm;
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};
static_assert(sizeof(LtHeuristic) == 96, "as cublasLtMatmulHeuristicResult_t");
enum : int { kFloat = 0, kHalf = 2, kBfloat16 = 14, kCompute = 68 };
enum : int { kTransposeFirst = 3, kEpilogue = 7, kGateBits = 11, kGateWidth = 12 };
constexpr int kGated = 136;  // an epilogue: the derivative of ReLU, whose bits a gate has
enum : int { kMaxWorkspace = 1, kReductions = 3, kFirstAlignment = 5, kLastAlignment = 8 };

struct LtLibrary {
  int (*create)(void** handle) = nullptr;
  int (*operation)(void** operation, int compute, int scale) = nullptr;
  int (*set_operation)(void* operation, int attribute, const void* value, size_t size) = nullptr;
  int (*layout)(void** layout, int type, uint64_t rows, uint64_t columns, int64_t stride) = nullptr;
  int (*preference)(void** preference) = nullptr;
  int (*set_preference)(void* preference, int attribute, const void* value, size_t size) = nullptr;
  int (*heuristic)(void* handle, void* operation, void* a, void* b, void* c, void* d, void* preference, int requested,
                   LtHeuristic* found, int* count) = nullptr;
  int (*multiply)(void* handle, void* operation, const void* alpha, const void* a, void* of_a, const void* b,
                  void* of_b, const void* beta, const void* c, void* of_c, void* d, void* of_d,
                  const LtAlgorithm* algorithm, void* workspace, size_t bytes, void* stream) = nullptr;
  bool stands_in = false;  // tests: for tensors on a CPU
};

template <class Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

std::optional<LtLibrary> functions_of(void* library) {
  LtLibrary lt;
  const bool whole = library != nullptr && find(library, "cublasLtCreate", lt.create) &&
                     find(library, "cublasLtMatmulDescCreate", lt.operation) &&
                     find(library, "cublasLtMatmulDescSetAttribute", lt.set_operation) &&
                     find(library, "cublasLtMatrixLayoutCreate", lt.layout) &&
                     find(library, "cublasLtMatmulPreferenceCreate", lt.preference) &&
                     find(library, "cublasLtMatmulPreferenceSetAttribute", lt.set_preference) &&
                     find(library, "cublasLtMatmulAlgoGetHeuristic", lt.heuristic) &&
                     find(library, "cublasLtMatmul", lt.multiply);
  return whole ? std::optional<LtLibrary>(lt) : std::nullopt;
}

// The library that PyTorch has loaded, if any: another copy would have other handles and other memory.
std::optional<LtLibrary> loaded() {
  for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12"}) {
    if (void* const library = dlopen(name, RTLD_NOW | RTLD_NOLOAD)) return functions_of(library);
  }
  return std::nullopt;
}

// ---- A product: its tensors as the library sees them, which takes matrices by columns, so that it is transposed. ----

constexpr size_t kMaxBytes = size_t{32} << 20;  // of workspace
constexpr size_t kMaxShapes = 1024;
constexpr int64_t kWholeBits = 128;  // a gate's rows are whole 16 bytes

using LtKey = std::array<int64_t, 8>;

struct LtProblem {
  int64_t rows, columns, inner;
  int type, device;
  bool transposed, added, gated;

  LtKey key() const { return {rows, columns, inner, type, device, transposed, added, gated}; }
};

// What is made for a problem once; the process keeps it. `refusal` says why there is no algorithm.
struct LtProduct {
  void *operation = nullptr, *left = nullptr, *right = nullptr, *out = nullptr;
  LtAlgorithm algorithm = {};
  size_t workspace = 0;
  std::string refusal;
};

std::mutex mutex;  // of all below
std::optional<std::optional<LtLibrary>> library;
std::map<int, void*> handles;
std::map<LtKey, LtProduct> made;

const std::optional<LtLibrary>& lt() {
  if (!library) library = loaded();
  return *library;
}

bool is_by_rows(const Tensor& t) {
  return t.stride(1) == 1 && t.stride(0) == t.size(1);
}

bool is_in_memory(const Tensor& t) {
  const int64_t sizes[] = {t.size(0), t.size(1)}, strides[] = {t.stride(0), t.stride(1)};
  int64_t offset = 0, bytes = 0;
  int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &dtype));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(t.get(), &offset));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(t.get(), &bytes));
  return reach_of(2, sizes, strides, offset, dtype) <= bytes;
}

bool are_together(const Tensor& one, const Tensor& other) {
  return one.get_device() == other.get_device() && one.is_cpu() == other.is_cpu();
}

bool is_aligned(const Tensor& t) {
  return reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0;
}

// Says why a product is none for the library, or describes it.
std::string describe(const Tensor& left, const Tensor& right, const std::optional<Tensor>& added, const Tensor& out,
                     bool gated, LtProblem& p) {
  const Tensor& base = added ? *added : out;
  for (const Tensor* t : {&left, &right, &base, &out}) {
    if (!t->is_cpu() && !t->is_cuda()) return "tensors must be on a CUDA device";
    if (t->dim() != 2) return "tensors must have two dimensions";
    if (!is_in_memory(*t)) return "tensors must be in memory: one was freed or cut";
    if (t->scalar_type() != left.scalar_type()) return "tensors must have one dtype";
    if (!are_together(*t, left)) return "tensors must be on one device";
    if (!is_aligned(*t)) return "tensors must begin at multiples of 16 bytes";
  }
  const ScalarType dtype = left.scalar_type();
  if (dtype != ScalarType::BFloat16 && dtype != ScalarType::Half) return "tensors must have 16 bits";
  p = {left.size(0),
       right.size(1),
       left.size(1),
       dtype == ScalarType::Half ? kHalf : kBfloat16,
       static_cast<int>(left.get_device()),
       !is_by_rows(right),
       added.has_value(),
       gated};
  if (right.size(0) != p.inner || base.size(0) != p.rows || out.size(0) != p.rows || base.size(1) != p.columns ||
      out.size(1) != p.columns) {
    return "sizes must agree";
  }
  if (p.rows == 0 || p.columns == 0 || p.inner == 0) return "tensors must have elements";
  if (p.columns % 8 != 0 || p.inner % 8 != 0) return "rows must be whole 16 bytes";
  if (gated && p.columns % kWholeBits != 0) return "a gate must have rows of whole 128 numbers";
  const bool right_by_columns = right.stride(0) == 1 && right.stride(1) == p.inner;
  if (!is_by_rows(left) || !is_by_rows(base) || !is_by_rows(out) || (p.transposed && !right_by_columns)) {
    return "tensors must be contiguous";
  }
  return "";
}

LtProduct make(const LtLibrary& lt, void* handle, const LtProblem& p) {
  LtProduct m;
  void* preference = nullptr;
  const int transpose = 1;
  const uint64_t first = p.transposed ? p.inner : p.columns, second = p.transposed ? p.columns : p.inner;
  bool right = lt.operation(&m.operation, kCompute, kFloat) == 0 &&
               (!p.transposed || lt.set_operation(m.operation, kTransposeFirst, &transpose, sizeof(transpose)) == 0) &&
               lt.layout(&m.right, p.type, first, second, first) == 0 &&
               lt.layout(&m.left, p.type, p.inner, p.rows, p.inner) == 0 &&
               lt.layout(&m.out, p.type, p.columns, p.rows, p.columns) == 0 && lt.preference(&preference) == 0;
  if (p.gated) {
    const int gated = kGated;
    // Its bits are known when it is multiplied; an algorithm depends on how they are aligned, not on where they are.
    const void* const somewhere = reinterpret_cast<const void*>(uintptr_t{4096});
    right = right && lt.set_operation(m.operation, kEpilogue, &gated, sizeof(gated)) == 0 &&
            lt.set_operation(m.operation, kGateWidth, &p.columns, sizeof(p.columns)) == 0 &&
            lt.set_operation(m.operation, kGateBits, &somewhere, sizeof(somewhere)) == 0;
  }
  // No sums in parts: they would be added in another order, or rounded in between.
  const uint32_t alignment = 16, none = 0;
  right = right && lt.set_preference(preference, kMaxWorkspace, &kMaxBytes, sizeof(kMaxBytes)) == 0 &&
          lt.set_preference(preference, kReductions, &none, sizeof(none)) == 0;
  for (int each = kFirstAlignment; each <= kLastAlignment; ++each) {
    right = right && lt.set_preference(preference, each, &alignment, sizeof(alignment)) == 0;
  }
  LtHeuristic found = {};
  int count = 0;
  right = right && lt.heuristic(handle, m.operation, m.right, m.left, m.out, m.out, preference, 1, &found, &count) == 0;
  if (!right || count < 1 || found.state != 0) {
    m.refusal = "it has no algorithm for (" + std::to_string(p.rows) + ", " + std::to_string(p.inner) + ") @ (" +
                std::to_string(p.inner) + ", " + std::to_string(p.columns) + ")" + (p.gated ? " with a gate" : "");
  }
  m.algorithm = found.algorithm;
  m.workspace = found.workspace;
  return m;
}

// Makes what a problem needs, with its device current and the lock held.
const LtProduct* prepare(const std::optional<LtLibrary>& lt, const LtProblem& p, std::string& refusal) {
  if (!lt) {
    refusal = "PyTorch has loaded no cuBLASLt";
    return nullptr;
  }
  if ((p.device < 0) != lt->stands_in) {
    refusal = "tensors must be on a CUDA device";
    return nullptr;
  }
  auto entry = made.find(p.key());
  if (entry == made.end()) {
    void*& handle = handles[p.device];
    if (made.size() >= kMaxShapes) {
      refusal = "more than " + std::to_string(kMaxShapes) + " shapes were asked for";
      return nullptr;
    }
    if (handle == nullptr && lt->create(&handle) != 0) {
      handle = nullptr;
      refusal = "it cannot be started";
      return nullptr;
    }
    entry = made.emplace(p.key(), make(*lt, handle, p)).first;
  }
  refusal = entry->second.refusal;
  return refusal.empty() ? &entry->second : nullptr;
}

// A device that is current for a while.
class LtDevice {
 public:
  explicit LtDevice(int device) {
    if (device >= 0 && aoti_torch_create_device_guard(device, &guard_) != 0) guard_ = nullptr;
  }
  ~LtDevice() {
    if (guard_ != nullptr) aoti_torch_delete_device_guard(guard_);
  }
  LtDevice(const LtDevice&) = delete;
  LtDevice& operator=(const LtDevice&) = delete;

 private:
  DeviceGuardHandle guard_ = nullptr;
};

void* stream_of(int device) {
  static int (*const current)(int32_t, void**) = reinterpret_cast<int (*)(int32_t, void**)>(
      dlsym(dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD), "aoti_torch_get_current_cuda_stream"));
  void* stream = nullptr;
  STD_TORCH_CHECK(device < 0 || (current != nullptr && current(device, &stream) == 0), "lt_product: no stream");
  return stream;
}

// Says why the library does not serve a product; nothing if it does.
std::string refusal(Tensor left, Tensor right, std::optional<Tensor> base, Tensor out, bool gated) {
  LtProblem p;
  std::string reason = describe(left, right, base, out, gated, p);
  if (reason.empty()) {
    const LtDevice on(p.device);
    const std::lock_guard<std::mutex> lock(mutex);
    prepare(lt(), p, reason);
  }
  return reason;
}

// A gate has a bit of each number of out, the lowest first: where it is 0, out is.
void product(Tensor left, Tensor right, std::optional<Tensor> base, std::optional<Tensor> gate, Tensor workspace,
             double scale, Tensor out) {
  LtProblem p;
  std::string reason = describe(left, right, base, out, gate.has_value(), p);
  STD_TORCH_CHECK(reason.empty(), "lt_product: ", reason);
  const LtDevice on(p.device);
  const std::lock_guard<std::mutex> lock(mutex);
  const std::optional<LtLibrary>& functions = lt();
  const LtProduct* const m = prepare(functions, p, reason);
  STD_TORCH_CHECK(m != nullptr, "lt_product: ", reason);
  const auto are_bytes = [&](const Tensor& t) {
    return are_together(t, left) && t.scalar_type() == ScalarType::Byte && t.is_contiguous();
  };
  const size_t bytes = static_cast<size_t>(workspace.numel());
  STD_TORCH_CHECK(are_bytes(workspace) && bytes >= m->workspace, "lt_product: workspace must be ", m->workspace,
                  " bytes on the tensors' device");
  if (gate) {
    const int64_t bits = out.numel() / 8;
    STD_TORCH_CHECK(are_bytes(*gate) && gate->numel() == bits && is_aligned(*gate), "lt_product: gate must be ", bits,
                    " bytes on the tensors' device, from a multiple of 16");
    const void* const where = gate->data_ptr();
    STD_TORCH_CHECK(functions->set_operation(m->operation, kGateBits, &where, sizeof(where)) == 0,
                    "lt_product: cuBLASLt does not take the gate");
  }
  const float alpha = static_cast<float>(scale), beta = p.added ? 1.0f : 0.0f;
  const void* const added = p.added ? base->data_ptr() : out.data_ptr();  // which is not read
  const int status = functions->multiply(handles[p.device], m->operation, &alpha, right.data_ptr(), m->right,
                                         left.data_ptr(), m->left, &beta, added, m->out, out.data_ptr(), m->out,
                                         &m->algorithm, workspace.data_ptr(), bytes, stream_of(p.device));
  STD_TORCH_CHECK(status == 0, "lt_product: cuBLASLt failed with status ", status);
}

// Takes the library at a path, for tests; PyTorch's own for "".
void drive_by(std::string path) {
  const std::lock_guard<std::mutex> lock(mutex);
  handles.clear();
  made.clear();
  library.reset();
  if (path.empty()) return;
  library = functions_of(dlopen(path.c_str(), RTLD_NOW));
  if (*library) (*library)->stands_in = true;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(crate_kernels_C, m) {
  m.def("lt_refusal(Tensor left, Tensor right, Tensor? base, Tensor out, bool gated) -> str");
  m.def(
      "lt_product(Tensor left, Tensor right, Tensor? base, Tensor? gate, Tensor(b!) workspace, float scale, "
      "Tensor(a!) out) -> ()");
  m.def("lt_drive_by(str path) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(crate_kernels_C, CompositeExplicitAutograd, m) {
  m.impl("lt_drive_by", TORCH_BOX(&drive_by));
  m.impl("lt_refusal", TORCH_BOX(&refusal));
}

CRATE_IMPLEMENT(m) {
  m.impl(CRATE_KERNEL("lt_product", &product));
}

}  // namespace crate_kernels
