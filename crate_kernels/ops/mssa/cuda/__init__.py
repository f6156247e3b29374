"""Plans the CUDA C++ kernels of subspace attention: csrc/mssa/cuda."""

from crate_kernels._cuda.launch import Kernel
from crate_kernels.ops.mssa.cuda import heads, long_pairs, long_rows, plain, steps, tensor_cores


def kernels() -> list[Kernel]:
    """List every kernel that calls launch on any GPU."""
    return [*tensor_cores.kernels(), *plain.kernels(), *steps.kernels()]


def hopper_kernels() -> list[Kernel]:
    """List every kernel that calls launch on GPUs of sm_90a alone; of whole heads, those of published sizes."""
    return [*heads.kernels(), *long_rows.kernels(), *long_pairs.kernels(), *tensor_cores.left_kernels()]
