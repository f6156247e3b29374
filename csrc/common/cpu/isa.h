// Says if the compiler can be asked for instruction-set levels file by file.
#pragma once

// GCC's `#pragma GCC target` also defines the feature macros that the intrinsics headers read. clang has no equivalent:
// it gets a file's level from its command line (crate_kernels/_native/build.py). With compilers that do not know AMX,
// the portable level is the only one, with the flags of the command line.
#if !defined(__x86_64__) || !defined(__GNUC__)
#define CRATE_X86_LEVELS 0
#elif defined(__clang__)
#define CRATE_X86_LEVELS (__clang_major__ >= 14)
#else
#define CRATE_X86_LEVELS (__GNUC__ >= 11)
#endif
