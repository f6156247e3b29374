"""The main kernels by name, as calls of their launchers on meta tensors."""

from tests.ops.ista import aot as ista
from tests.ops.mssa import aot as mssa
from tests.ops.tssa import aot as tssa

LONG, SHORT = 16384, 197
_BATCH = {LONG: 1, SHORT: 64}


def _tssa(form, backward):
    call = {"full": tssa.full, "causal": tssa.causal}[form]
    return call(4096, 12, 64, batch=16, backward=backward)


# name: (call, whether only its launches of backward kernels count)
FAMILIES = {
    **{
        f"mssa_{what}-d{head_dim}-n{seqlen}": (make(seqlen, head_dim, batch=_BATCH[seqlen]), False)
        for what, make in (("forward", mssa.forward), ("backward", mssa.backward))
        for head_dim in (64, 128)
        for seqlen in (LONG, SHORT)
    },
    **{f"mssa_decode-d{head_dim}": (mssa.decode(1, head_dim), False) for head_dim in (64, 128)},
    "tssa_forward-d64-n4096": (_tssa("full", False), False),
    "tssa_backward-d64-n4096": (_tssa("full", True), True),
    "tssa_causal_forward-d64-n4096": (_tssa("causal", False), False),
    "tssa_causal_backward-d64-n4096": (_tssa("causal", True), True),
    "ista-d768": (ista.step(12608, 768), False),
}


def inner_trips(launch):
    """Return how often a loop in a loop runs per trip of the outer one, on average.

    The causal backward sums its chunk up to each tile, again for every tile.
    """
    arguments = launch.arguments
    if launch.function.__name__ == "_tssa_causal_bwd_kernel":
        return (arguments["chunk_size"] / arguments["BLOCK_N"] - 1) / 2
    return 1.0


def kept(launches, backward):
    """List the launches of a family, each kernel once."""
    found, seen = [], set()
    for launch in launches:
        name = launch.function.__name__
        if backward and not ("bwd" in name or "dbias" in name):
            continue
        key = name, str(sorted((k, v) for k, v in launch.arguments.items() if isinstance(v, (int, str))))
        if key not in seen:
            seen.add(key)
            found.append(launch)
    return found
