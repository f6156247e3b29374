// The kernels of one instruction set and one packing of words.
#pragma once

#include "backward.h"
#include "decode.h"
#include "forward.h"
#include "rectangular.h"

namespace {

template <class T>
const crate_kernels::MssaKernels kMssaKernels = {
    mssa_forward<T>, mssa_backward<T>,   mssa_combine, mssa_rectangular_delta<T>, mssa_rectangular_backward<T>,
    mssa_decode,     mssa_decode_combine};

}  // namespace
