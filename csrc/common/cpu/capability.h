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

// The level that the kernels use: the detected one, unless a test asked for a lower one.
Capability capability();

std::string capability_name(Capability level);

// The levels that were compiled, lowest first.
std::vector<std::string> compiled_capabilities();

// Uses another level from now on. Throws if this machine does not have it. For tests.
void set_capability(const std::string& name);

}  // namespace crate_kernels
