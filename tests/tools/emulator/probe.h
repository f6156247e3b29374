// Launches kernels of the emulator's own tests, which no driver knows.
#pragma once

#include <stdexcept>
#include <string>

#include <torch/csrc/stable/library.h>

#include "../../../csrc/common/cuda/device.cuh"
#include "../../../csrc/common/tensor.h"

namespace crate_kernels {

template <auto kernel, class... Arguments>
void launch(const emulator::Launch& l, const Arguments&... arguments) {
  const void* const function = reinterpret_cast<const void*>(kernel);
  emulator::Error error = emulator::kSuccess;
  if (l.shared_bytes > emulator::kUnasked) error = emulator::allow(function, l.shared_bytes);
  if (error == emulator::kSuccess) error = emulator::check(l, function);
  if (error != emulator::kSuccess) throw std::runtime_error("CUDA error " + std::to_string(error));
  emulator::run(l, [&] { kernel(arguments...); });
}

// Calls f with a zero of a tensor's type, of 16 bits; f takes only that type.
template <class F>
void with_half(const Tensor& t, F&& f) {
  if (t.scalar_type() == ScalarType::BFloat16) return f(bf16{});
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Half, "a probe takes bfloat16 or float16");
  f(fp16{});
}

}  // namespace crate_kernels
