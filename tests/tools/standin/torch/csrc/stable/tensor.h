// Stands in for PyTorch's header of this name: strided memory with a dtype, filled with small numbers that repeat.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <vector>

#include <torch/headeronly/core/ScalarType.h>

namespace torch::stable {

using torch::headeronly::ScalarType;

class Tensor {
 public:
  Tensor(ScalarType dtype, std::vector<int64_t> sizes) : dtype_(dtype), sizes_(std::move(sizes)) {
    strides_.resize(sizes_.size());
    for (int64_t d = dim() - 1; d >= 0; --d) strides_[d] = d == dim() - 1 ? 1 : strides_[d + 1] * sizes_[d + 1];
    memory_.reset(new char[numel() * element_size() + 1](), std::default_delete<char[]>());
  }

  // Memory of somebody else's.
  Tensor(ScalarType dtype, std::vector<int64_t> sizes, std::vector<int64_t> strides, std::shared_ptr<char> memory)
      : dtype_(dtype), sizes_(std::move(sizes)), strides_(std::move(strides)), memory_(std::move(memory)) {}

  static Tensor numbers(ScalarType dtype, std::vector<int64_t> sizes) {
    Tensor t(dtype, std::move(sizes));
    for (int64_t i = 0; i < t.numel(); ++i) t.set(i, static_cast<float>(i * 37 % 101 - 50) / 50.0f);
    return t;
  }
  template <class T>
  static Tensor of(ScalarType dtype, std::vector<int64_t> sizes, std::initializer_list<T> values) {
    Tensor t(dtype, std::move(sizes));
    std::copy(values.begin(), values.end(), static_cast<T*>(t.data_ptr()));
    return t;
  }

  // Tokens and heads side by side in memory, as a projection leaves them.
  Tensor transposed(int64_t a, int64_t b) const {
    Tensor t = *this;
    std::swap(t.sizes_[a], t.sizes_[b]);
    std::swap(t.strides_[a], t.strides_[b]);
    return t;
  }

  int64_t dim() const { return static_cast<int64_t>(sizes_.size()); }
  int64_t size(int64_t d) const { return sizes_[d]; }
  int64_t stride(int64_t d) const { return strides_[d]; }
  int64_t numel() const {
    int64_t count = 1;
    for (const int64_t size : sizes_) count *= size;
    return count;
  }
  bool is_contiguous() const {
    int64_t expected = 1;
    for (int64_t d = dim() - 1; d >= 0; expected *= sizes_[d--]) {
      if (sizes_[d] != 1 && strides_[d] != expected && numel() > 0) return false;
    }
    return true;
  }
  size_t element_size() const { return size_of(dtype_); }
  static size_t size_of(ScalarType dtype) {
    switch (dtype) {
      case ScalarType::Bool:
        return 1;
      case ScalarType::BFloat16:
      case ScalarType::Half:
        return 2;
      case ScalarType::Long:
      case ScalarType::Double:
        return 8;
      default:
        return 4;
    }
  }
  ScalarType scalar_type() const { return dtype_; }
  void* data_ptr() const { return memory_.get(); }
  const std::vector<int64_t>& sizes() const { return sizes_; }
  const std::vector<int64_t>& strides() const { return strides_; }
  int32_t get_device_index() const { return -1; }
  const void* get() const { return this; }

  void zero() const {
    const int64_t item = static_cast<int64_t>(element_size());
    for (int64_t i = 0; i < numel(); ++i) {
      int64_t at = 0, left = i;
      for (int64_t d = dim() - 1; d >= 0; left /= sizes_[d--]) at += left % sizes_[d] * strides_[d];
      std::memset(static_cast<char*>(data_ptr()) + at * item, 0, static_cast<size_t>(item));
    }
  }

 private:
  void set(int64_t i, float value) {
    if (dtype_ == ScalarType::Float) {
      static_cast<float*>(data_ptr())[i] = value;
    } else {
      uint32_t bits;
      std::memcpy(&bits, &value, sizeof bits);
      static_cast<uint16_t*>(data_ptr())[i] = static_cast<uint16_t>(bits >> 16);
    }
  }

  ScalarType dtype_;
  std::vector<int64_t> sizes_, strides_;
  std::shared_ptr<char> memory_;
};

}  // namespace torch::stable

// What shim.h has of a tensor in PyTorch. Nobody frees or cuts this memory.
inline const torch::stable::Tensor& standin_tensor(const void* handle) {
  return *static_cast<const torch::stable::Tensor*>(handle);
}
inline int aoti_torch_get_dim(const void* t, int64_t* dim) {
  *dim = standin_tensor(t).dim();
  return 0;
}
inline int aoti_torch_get_sizes(const void* t, int64_t** sizes) {
  *sizes = const_cast<int64_t*>(standin_tensor(t).sizes().data());
  return 0;
}
inline int aoti_torch_get_strides(const void* t, int64_t** strides) {
  *strides = const_cast<int64_t*>(standin_tensor(t).strides().data());
  return 0;
}
inline int aoti_torch_get_dtype(const void* t, int32_t* dtype) {
  *dtype = static_cast<int32_t>(standin_tensor(t).scalar_type());
  return 0;
}
inline int aoti_torch_zero_(const void* t) {
  standin_tensor(t).zero();
  return 0;
}
inline int aoti_torch_get_storage_offset(const void*, int64_t* offset) {
  *offset = 0;
  return 0;
}
inline int aoti_torch_get_storage_size(const void*, int64_t* bytes) {
  *bytes = INT64_MAX;
  return 0;
}
inline size_t aoti_torch_dtype_element_size(int32_t dtype) {
  return torch::stable::Tensor::size_of(static_cast<torch::headeronly::ScalarType>(dtype));
}
