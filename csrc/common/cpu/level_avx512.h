// AVX-512: 32 registers of 16 floats. Include first, before any other header.
#pragma once

#include "isa.h"
#if CRATE_X86_LEVELS && !defined(__clang__)
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif

#define CRATE_LANES 16
#define CRATE_MAX_COLUMNS 4
#define CRATE_BF16_DOT 0
#define CRATE_AMX 0
