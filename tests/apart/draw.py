"""The classes of calls, and the draw of one from its seed."""

import itertools

from tests.apart import caches, modules, mssa, refusals, sparse, transforms, tssa
from tests.apart.call import Draw

# Frequency per class. A seed's class is its place in this list, so that any run of seeds has them in proportion.
SHARES = {
    mssa.draw: {
        "mssa plain": 6, "mssa layout": 4, "mssa padding": 5, "mssa far padding": 4, "mssa packed": 6,
        "mssa dropout": 4, "mssa saturated dropout": 4, "mssa threshold": 3,
        "mssa relu": 2, "mssa identity": 2, "mssa large norms": 4,
        "mssa common mean": 5, "mssa tokens": 5, "mssa scale": 3, "mssa lse": 4, "mssa autocast": 2, "mssa modes": 6,
        "mssa sinks": 4, "mssa ones": 4, "mssa saved": 3,
    },
    tssa.draw: {
        "tssa plain": 5, "tssa layout": 4, "tssa padding": 4, "tssa far padding": 3, "tssa packed": 5,
        "tssa dropout": 4, "tssa saturated dropout": 3, "tssa bias": 5, "tssa temp": 4, "tssa tokens": 6,
        "tssa membership": 3, "tssa autocast": 1, "tssa modes": 5, "tssa ones": 3, "tssa drifting": 3, "tssa saved": 3,
    },
    caches.mssa: {"mssa cache": 9},
    caches.tssa: {"tssa cache": 7},
    caches.drifting: {"tssa cache drifting": 2},
    sparse.draw: {
        "ista plain": 5, "ista layout": 4, "ista values": 3, "ista mixed": 2, "ista autocast": 2, "ista modes": 3,
        "ista ones": 2, "ista saved": 2,
        "ista_overcomplete plain": 5, "ista_overcomplete layout": 3, "ista_overcomplete values": 2,
        "ista_overcomplete mixed": 2, "ista_overcomplete autocast": 1, "ista_overcomplete modes": 2,
        "ista_overcomplete ones": 1, "ista_overcomplete saved": 1,
    },
    modules.draw: {
        "nn MSSA": 3, "nn TSSA": 2, "nn CausalMSSA": 2, "nn CausalTSSA": 2, "nn ISTA": 2, "nn OvercompleteISTA": 2,
    },
    transforms.draw: {
        "mssa transforms": 2, "tssa transforms": 2, "ista transforms": 1, "ista_overcomplete transforms": 1,
    },
    refusals.draw: {"refusals": 5},
}  # fmt: skip


def _interleave():
    """List (function, kind) as often as its share, spread over the list."""
    places = [
        ((i + 0.5) / share, function, kind)
        for function, kinds in SHARES.items()
        for kind, share in kinds.items()
        for i in range(share)
    ]
    return [(function, kind) for _, function, kind in sorted(places, key=lambda place: place[0])]


ORDER = _interleave()


# A cache is a separate operator here: mssa decodes by other kernels, and tssa makes steps.
OPERATORS = ("mssa", "mssa cache", "tssa", "tssa cache", "ista", "ista_overcomplete")


def operator_of(kind):
    """Return the operator that calls of a class are of, the longest it begins with; "" for modules and refusals."""
    return max((op for op in OPERATORS if f"{kind} ".startswith(f"{op} ")), key=len, default="")


def seeds_of(operator, start=0):
    """Yield the seeds, from ``start``, whose calls are of one operator."""
    kinds = [operator_of(kind) == operator for _, kind in ORDER]
    return (seed for seed in itertools.count(start) if kinds[seed % len(kinds)])


def draw(seed, backend=None):
    """Draw the call of one seed; ``backend`` forces its backend ("none" for None)."""
    function, kind = ORDER[seed % len(ORDER)]
    return function(Draw(seed), seed, kind, backend)
