// AVX-512 with the bf16 dot product. Include first, before any other header.
#pragma once

#include "isa.h"
#if CRATE_X86_LEVELS && !defined(__clang__)
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,prefer-vector-width=512")
#endif

#define CRATE_LANES 16
#define CRATE_MAX_COLUMNS 4
#define CRATE_BF16_DOT 1
#define CRATE_AMX 0
