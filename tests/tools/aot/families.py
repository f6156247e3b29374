"""The main kernels by name: the calls of their launchers on meta tensors."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tests.ops.ista import aot as ista
from tests.ops.mssa import aot as mssa
from tests.ops.tssa import aot as tssa

_BATCH = {16384: 1, 197: 64}


@dataclass(frozen=True)
class Family:
    """A call of the launchers.

    Attributes:
        call: runs the launchers.
        backward: whether only launches of backward kernels count: the call runs the forward too.
    """

    call: Callable[[], None]
    backward: bool = False


def _tssa(form, backward):
    return Family(form(4096, 12, 64, batch=16, backward=backward), backward)


FAMILIES = {
    **{
        f"mssa_{what}-d{head_dim}-n{seqlen}": Family(make(seqlen, head_dim, batch=_BATCH[seqlen]))
        for what, make in (("forward", mssa.forward), ("backward", mssa.backward))
        for head_dim in (64, 128)
        for seqlen in _BATCH
    },
    **{
        f"mssa_backward_fp16-d{head_dim}-n16384": Family(mssa.backward(16384, head_dim, torch.float16, batch=1))
        for head_dim in (64, 128)
    },
    **{
        f"mssa_ranges_backward-d{head_dim}-n4096": Family(mssa.between(True, 4096, head_dim), True)
        for head_dim in (64, 128)
    },
    **{f"mssa_decode-d{head_dim}": Family(mssa.decode(1, head_dim)) for head_dim in (64, 128)},
    "tssa_forward-d64-n4096": _tssa(tssa.full, False),
    "tssa_backward-d64-n4096": _tssa(tssa.full, True),
    "tssa_causal_forward-d64-n4096": _tssa(tssa.causal, False),
    "tssa_causal_backward-d64-n4096": _tssa(tssa.causal, True),
    "ista-d768": Family(ista.step(12608, 768)),
}


def launches(name, target, record):
    """List the launches of a family on ``target``, each kernel once; ``record(call, target)`` lists all."""
    family, found = FAMILIES[name], {}
    for launch in record(family.call, target):
        function = launch.function.__name__
        if not family.backward or "bwd" in function or "dbias" in function:
            constants = sorted((k, v) for k, v in launch.arguments.items() if isinstance(v, (int, str)))
            found.setdefault((function, str(constants)), launch)
    return list(found.values())
