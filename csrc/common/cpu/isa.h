// Which instruction-set levels the compiler can be asked for, file by file.
#pragma once

// GCC's `#pragma GCC target` also defines the feature macros that the intrinsics headers look at; clang
// has no equivalent, so there the portable level is the only one and its flags are the command line's.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CRATE_X86_LEVELS 1
#else
#define CRATE_X86_LEVELS 0
#endif
