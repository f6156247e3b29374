"""The plain kernels of mssa as a backend of their own: every call goes to them, whatever the emulated GPU."""

from crate_kernels.ops.mssa.cuda_decode import decode
from crate_kernels.ops.mssa.cuda_plain import backward, forward

__all__ = ["backward", "decode", "forward"]
