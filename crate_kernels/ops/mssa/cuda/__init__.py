"""Plans the CUDA C++ kernels of subspace attention: csrc/mssa/cuda."""

from crate_kernels._cuda.launch import Kernel
from crate_kernels.ops.mssa.cuda import plain, steps, tensor_cores


def kernels() -> list[Kernel]:
    """List every kernel that calls launch."""
    return [*tensor_cores.kernels(), *plain.kernels(), *steps.kernels()]
