"""Subspace attention between two ranges of one sequence: what a process computes that has a part of it.

``rows`` and ``columns`` are ranges of the sequence's tokens, w of both the same projection. Results of several ranges
of columns are put together by their lse. The backward gives what the columns add to the gradient of the rows, as
queries and keys at once (docs/kernels.md): with everybody's w, dout, lse, delta and dlse, each range of tokens is
completed where it is, and nothing is added up over processes.
"""

from crate_kernels.ops.mssa.rectangular.call import RangeTokens, RectangularCall, sees
from crate_kernels.ops.mssa.rectangular.op import PART, backward, delta, forward, merge_, rounded

__all__ = ["PART", "RangeTokens", "RectangularCall", "backward", "delta", "forward", "merge_", "rounded", "sees"]
