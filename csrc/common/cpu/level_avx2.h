// AVX2 with FMA: 16 registers of 8 floats. Include first, before any other header.
#pragma once

#include "isa.h"
#if CRATE_X86_LEVELS && !defined(__clang__)
#pragma GCC target("avx2,fma,f16c")
#endif

#define CRATE_LANES 8
#define CRATE_MAX_COLUMNS 2
#define CRATE_BF16_DOT 0
#define CRATE_AMX 0
