// The instruction sets that the kernels are built for, and the one that this process uses.
#pragma once

#include <string>
#include <vector>

namespace crate_kernels {

// In rising order: a machine that has one level has all before it.
enum class Capability : int { portable, avx2, avx512, avx512_bf16, amx };
constexpr int kCapabilities = 5;

// The highest compiled level that this machine has.
Capability detected_capability();

// The level that the kernels use: the detected one, unless a test asked for another.
Capability capability();

// The level whose products of bf16 the kernels use, which a test's choice also sets. It is capability(), but avx512 on
// an Intel processor with AVX512-BF16 and without AMX: a dot product of bf16 pairs starts every second clock there, and
// two float32 multiply-adds start in each, so float32 multiplies twice as fast.
Capability bf16_products();

std::string capability_name(Capability level);

// The levels that were compiled, lowest first.
std::vector<std::string> compiled_capabilities();

// Uses another level from now on; an empty name: the machine's own choice again. Throws if this machine does not have
// it. For tests.
void set_capability(const std::string& name);

}  // namespace crate_kernels
