"""Decoding in Triton: the causal forward, with the state of a cache before the first token and advanced by all.

A step of one token is one launch. Per head it moves (2 itemsize + 32) head_dim + 20 bytes, however much was decoded
before: it reads the token and writes its output, 2 itemsize head_dim; reads and writes the state, 2 head_dim + 1 values
in fp64; and writes the membership. A long block, as a prompt, takes the forward's chunks.
"""

from __future__ import annotations

from torch import Tensor

from crate_kernels._core import operator
from crate_kernels.ops.tssa import op_checks
from crate_kernels.ops.tssa.call import State, TSSACall
from crate_kernels.ops.tssa.triton.causal import _tssa_causal_fwd_kernel, causal_arguments
from crate_kernels.ops.tssa.triton.launch import TokenSizes, run_causal
from crate_kernels.ops.tssa.triton.tile import CacheState


def decode(
    w: Tensor,
    temp: Tensor,
    denom_bias: Tensor | None,
    state: State,
    key_padding_mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Advance the running sums over the new tokens; they are changed in place.

    A step is one launch, which reads the sums and writes them back; the host reads nothing. The sums of a long block,
    which goes by chunks, are added to the state at the end.
    """
    op_checks.decode(w, temp, denom_bias, state, key_padding_mask)
    sizes, (energy, weighted, mass, lengths) = TokenSizes(w, TSSACall(key_padding_mask)), state
    out, membership = operator.empty_out(w), sizes.empty_rows()
    arguments = causal_arguments(sizes, w, temp, denom_bias, out, membership)
    arguments["state"] = CacheState(energy, weighted, mass, lengths)
    added = run_causal(_tssa_causal_fwd_kernel, sizes, arguments)
    if added is not None:
        by_energy, by_moment = added
        channels = sizes.width
        energy += by_energy[:, :channels].view_as(energy)
        weighted += by_moment[:, :channels].view_as(weighted)
        mass += by_moment[:, channels:]
        state.advance(w, key_padding_mask)
    return out, membership
