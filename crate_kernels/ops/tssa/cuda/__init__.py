"""Plans the CUDA C++ kernels of token statistics, which csrc/tssa/cuda has."""

from crate_kernels.ops.tssa.cuda.forms import choose
from crate_kernels.ops.tssa.cuda.names import kernels
from crate_kernels.ops.tssa.cuda.passes import backward, forward
from crate_kernels.ops.tssa.cuda.walking import kernels as hopper_kernels
from crate_kernels.ops.tssa.cuda.walking import sums_read_every

__all__ = ["backward", "choose", "forward", "hopper_kernels", "kernels", "sums_read_every"]
