// Which instruction sets the kernels are built for, and which one this process uses.
#pragma once

#include <string>
#include <vector>

namespace crate_kernels {

// In order: each level runs on every machine that has the next.
enum class Capability : int { portable, avx2, avx512, avx512_bf16 };
constexpr int kCapabilities = 4;

// What this machine has, among the levels that were compiled.
Capability detected_capability();

// What the kernels use: the detected level, unless a test asked for a lower one.
Capability capability();

std::string capability_name(Capability level);

// The levels that were compiled, lowest first.
std::vector<std::string> compiled_capabilities();

// Use another level from now on; refuses one that this machine does not have. For tests.
void set_capability(const std::string& name);

}  // namespace crate_kernels
