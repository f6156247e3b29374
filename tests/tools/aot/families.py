"""The main kernels by name: the calls of their launchers on meta tensors, and what their code does not say."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from tests.ops.ista import aot as ista
from tests.ops.mssa import aot as mssa
from tests.ops.tssa import aot as tssa

_BATCH = {16384: 1, 197: 64}
_ITEM = 2  # bytes of a bf16 number


@dataclass(frozen=True)
class Family:
    """A call of the launchers.

    Attributes:
        call: runs the launchers.
        backward: whether only launches of backward kernels count: the call runs the forward too.
        streams: whether the memory's bandwidth is its limit, if the code is good; otherwise the products are.
    """

    call: Callable[[], None]
    backward: bool = False
    streams: bool = False


def _tssa(form, backward):
    return Family(form(4096, 12, 64, batch=16, backward=backward), backward, streams=True)


FAMILIES = {
    **{
        f"mssa_{what}-d{head_dim}-n{seqlen}": Family(make(seqlen, head_dim, batch=_BATCH[seqlen]))
        for what, make in (("forward", mssa.forward), ("backward", mssa.backward))
        for head_dim in (64, 128)
        for seqlen in _BATCH
    },
    **{f"mssa_decode-d{head_dim}": Family(mssa.decode(1, head_dim), streams=True) for head_dim in (64, 128)},
    "tssa_forward-d64-n4096": _tssa(tssa.full, False),
    "tssa_backward-d64-n4096": _tssa(tssa.full, True),
    "tssa_causal_forward-d64-n4096": _tssa(tssa.causal, False),
    "tssa_causal_backward-d64-n4096": _tssa(tssa.causal, True),
    "ista-d768": Family(ista.step(12608, 768)),
}

# Tensors of the tokens' size that a step reads or writes, by the tables in the kernels' files; rows are left out.
_PASSES = {
    "_tssa_fwd_kernel": {"ENERGY": 1, "MEMBERS": 1, "OUTPUT": 2},
    "_tssa_bwd_kernel": {"DGATE": 2, "DLOGIT": 1, "DW": 3},
    "_tssa_causal_fwd_kernel": {"ENERGY": 1, "MEMBERS": 1, "OUTPUT": 2},
    "_tssa_causal_bwd_kernel": {"TOTALS": 1, "DMOMENT": 2, "DMEMBERS": 2, "DENERGY": 1, "DW": 3},
}


def traffic(launch):
    """Return the bytes that a trip of the main loop has to move, or None where every byte that it asks for counts.

    Lanes beyond the tensor's edge, and tokens that a loop reads again, are not in it.
    """
    arguments, name = launch.arguments, launch.function.__name__
    if name == "_mssa_decode_kernel":
        return arguments["CACHED"].BLOCK * arguments["CACHED"].HEAD_DIM * _ITEM
    steps = [passes for step, passes in _PASSES.get(name, {}).items() if arguments.get(step)]
    if len(steps) != 1:  # several steps have a loop each
        return None
    tokens = arguments["BLOCK_N"] * math.prod(inner_trips(launch)[:1])  # of a trip of the outermost loop
    heads = arguments.get("HEADS", arguments["NHEADS"])  # of a program
    return steps[0] * tokens * heads * arguments["HEAD_DIM"] * _ITEM


def inner_trips(launch):
    """Return how often the loops of depth 1, 2, ... run per trip of the loop around them, on average.

    The causal backward goes back over its marks, over the tiles of a mark, and sums what is before each tile up again.
    """
    arguments = launch.arguments
    if launch.function.__name__ == "_tssa_causal_bwd_kernel" and (arguments["DMEMBERS"] or arguments["DW"]):
        tiles = arguments["MARK"] / arguments["BLOCK_N"]
        return tiles, (tiles - 1) / 2
    return ()


def launches(name, target, record):
    """List the launches of a family on ``target``, each kernel once; ``record(call, target)`` lists all."""
    family, found = FAMILIES[name], {}
    for launch in record(family.call, target):
        function = launch.function.__name__
        if not family.backward or "bwd" in function or "dbias" in function:
            constants = sorted((k, v) for k, v in launch.arguments.items() if isinstance(v, (int, str)))
            found.setdefault((function, str(constants)), launch)
    return list(found.values())
