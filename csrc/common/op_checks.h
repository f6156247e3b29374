// Checks the tensors of a call on a CPU against each other. Kernels trust sizes and devices, and read another dtype as
// wrong numbers. Autograd hands a backward what its forward saved, which its owner may have changed since.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "tensor.h"

namespace crate_kernels {

// Sizes of a tensor of at most four dimensions.
struct Sizes {
  int64_t at[4] = {}, dims = 0;

  Sizes(std::initializer_list<int64_t> sizes) : dims(static_cast<int64_t>(sizes.size())) {
    std::copy(sizes.begin(), sizes.end(), at);
  }
};

class OpChecks {
 public:
  // `call` begins every message.
  OpChecks(const char* call, const char* name, const Tensor& first) : call_(call) {
    if (!here(first)) refuse(name, "on cpu", first);
    in_memory(name, first, view_of(first));
  }

  // A tensor that kernels read in any strides.
  void strided(const char* name, const Tensor& t, ScalarType dtype, const Sizes& sizes) const {
    if (here(t) && t.scalar_type() == dtype) {
      const TensorView v = view_of(t);
      if (v.dims == sizes.dims && std::equal(v.sizes, v.sizes + v.dims, sizes.at)) return in_memory(name, t, v);
    }
    refuse(name, described(dtype_name(dtype), sizes.at, sizes.dims) + " on cpu", t);
  }
  void strided(const char* name, const std::optional<Tensor>& t, ScalarType dtype, const Sizes& sizes) const {
    if (t.has_value()) strided(name, *t, dtype, sizes);
  }

  // A tensor of which kernels use only the address.
  void contiguous(const char* name, const Tensor& t, ScalarType dtype, const Sizes& sizes) const {
    strided(name, t, dtype, sizes);
    check_contiguous(name, t);
  }
  void contiguous(const char* name, const std::optional<Tensor>& t, ScalarType dtype, const Sizes& sizes) const {
    if (t.has_value()) contiguous(name, *t, dtype, sizes);
  }

  // Contiguous fp32 numbers.
  template <class T>
  void numbers(const char* name, const T& t, const Sizes& sizes) const {
    contiguous(name, t, ScalarType::Float, sizes);
  }

  // As many contiguous elements of any dtype that kernels have.
  Operand elements(const char* name, const Tensor& t, int64_t numel) const {
    if (!here(t) || t.numel() != numel) refuse(name, std::to_string(numel) + " elements on cpu", t);
    check_contiguous(name, t);
    in_memory(name, t, view_of(t));
    return {t.data_ptr(), dtype_of(t)};
  }
  Operand elements(const char* name, const std::optional<Tensor>& t, int64_t numel) const {
    return t.has_value() ? elements(name, *t, numel) : Operand{};
  }

  void present(const char* name, const std::optional<Tensor>& t) const {
    if (!t.has_value()) fail(std::string(name) + " must be a tensor, got None");
  }

  void rank(const char* name, const Tensor& t, int64_t dims) const {
    if (t.dim() != dims) refuse(name, "of " + std::to_string(dims) + " dimensions", t);
  }

  // The options that operators have in common, for `batch` sequences of `seqlen` tokens; null: absent.
  void options(const std::optional<Tensor>& key_padding_mask, const std::optional<Tensor>& cu_seqlens,
               const std::optional<Tensor>& seed, int64_t batch, int64_t seqlen) const {
    contiguous("key_padding_mask", key_padding_mask, ScalarType::Bool, {batch, seqlen});
    contiguous("seed", seed, ScalarType::Long, {});
    if (!cu_seqlens.has_value()) return;
    rank("cu_seqlens", *cu_seqlens, 1);
    contiguous("cu_seqlens", cu_seqlens, ScalarType::Int, {std::max<int64_t>(cu_seqlens->size(0), 1)});
  }

 private:
  static int32_t type_of(const Tensor& t) {
    int32_t type = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(t.get(), &type));
    return type;
  }

  static bool here(const Tensor& t) { return type_of(t) == aoti_torch_device_type_cpu(); }

  struct TensorView {
    int64_t dims = 0, *sizes = nullptr, *strides = nullptr;
  };

  static TensorView view_of(const Tensor& t) {
    TensorView v;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(t.get(), &v.dims));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(t.get(), &v.sizes));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(t.get(), &v.strides));
    return v;
  }

  void in_memory(const char* name, const Tensor& t, const TensorView& v) const {
    int64_t offset = 0, bytes = 0;
    int32_t dtype = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &dtype));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(t.get(), &offset));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(t.get(), &bytes));
    const int64_t reach = reach_of(v.dims, v.sizes, v.strides, offset, dtype);
    if (reach <= bytes) return;
    fail(std::string(name) + " must have a storage of at least " + std::to_string(reach) + " bytes, got one of " +
         std::to_string(bytes) + ": it was freed or cut");
  }

  void check_contiguous(const char* name, const Tensor& t) const {
    if (!t.is_contiguous()) fail(std::string(name) + " must be contiguous");
  }

  static std::string dtype_name(ScalarType dtype) {
    switch (dtype) {
      case ScalarType::Float:
        return "float32";
      case ScalarType::BFloat16:
        return "bfloat16";
      case ScalarType::Half:
        return "float16";
      case ScalarType::Double:
        return "float64";
      case ScalarType::Int:
        return "int32";
      case ScalarType::Long:
        return "int64";
      case ScalarType::Bool:
        return "bool";
      default:
        return torch::headeronly::toString(dtype);
    }
  }

  static std::string device_name(int32_t type, int32_t index) {
    if (type == aoti_torch_device_type_cpu()) return "cpu";
    if (type == aoti_torch_device_type_meta()) return "meta";
    const std::string name = type == aoti_torch_device_type_cuda() ? "cuda" : "device type " + std::to_string(type);
    return index < 0 ? name : name + ":" + std::to_string(index);
  }

  static std::string described(const std::string& dtype, const int64_t* sizes, int64_t dims) {
    std::string text = dtype + " (";
    for (int64_t d = 0; d < dims; ++d) text += (d > 0 ? ", " : "") + std::to_string(sizes[d]);
    return text + (dims == 1 ? ",)" : ")");
  }

  [[noreturn]] void refuse(const char* name, const std::string& wanted, const Tensor& t) const {
    const auto sizes = t.sizes();
    const std::string got = described(dtype_name(t.scalar_type()), sizes.data(), static_cast<int64_t>(sizes.size()));
    fail(std::string(name) + " must be " + wanted + ", got " + got + " on " +
         device_name(type_of(t), t.get_device_index()));
  }

  // Unlike STD_TORCH_CHECK, which names a place in the sources first.
  [[noreturn]] void fail(const std::string& message) const {
    throw std::runtime_error(std::string(call_) + ": " + message);
  }

  const char* call_;
};

}  // namespace crate_kernels
