// Kernels of this library that plans call without PyTorch's dispatcher (plan.cpp).
#pragma once

#include <cstdint>

#include <torch/csrc/stable/library.h>

#include "box.h"

namespace crate_kernels {

using Boxed = void (*)(StableIValue* stack, uint64_t arguments, uint64_t results);

// Lets plans call a kernel by the name of its op. Returns the kernel.
Boxed offer(const char* name, Boxed kernel);

// The kernel that was offered under a name, "mssa_fwd"; null if none was.
Boxed offered(const char* name);

}  // namespace crate_kernels

// The kernel of an op, as CRATE_BOX has it, for m.impl and for plans.
#define CRATE_KERNEL(name, function) name, crate_kernels::offer(name, CRATE_BOX(function))
