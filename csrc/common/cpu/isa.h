// Says if the compiler can be asked for instruction-set levels file by file.
#pragma once

// GCC's `#pragma GCC target` also defines the feature macros that the intrinsics headers read. clang has no equivalent:
// there, and with a GCC before 11, which does not know AMX, the portable level is the only one, with the flags of the
// command line.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11
#define CRATE_X86_LEVELS 1
#else
#define CRATE_X86_LEVELS 0
#endif
