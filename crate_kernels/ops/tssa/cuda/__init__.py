"""Plans the CUDA C++ kernels of token statistics, which csrc/tssa/cuda has."""

from crate_kernels.ops.tssa.cuda.forms import choose
from crate_kernels.ops.tssa.cuda.names import kernels
from crate_kernels.ops.tssa.cuda.passes import backward, forward

__all__ = ["backward", "choose", "forward", "kernels"]
