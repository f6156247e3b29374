// The level that every machine has: 128-bit vectors, SSE2 or NEON. Include first.
#pragma once

#include "isa.h"

#define CRATE_LANES 4
#define CRATE_MAX_COLUMNS 2  // width of a micro-kernel, in vectors
#define CRATE_BF16_DOT 0
#define CRATE_AMX 0
