"""An output has the strides that compilers expect, whatever those of the inputs; no output is a view."""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from crate_kernels import SubspaceCache, TokenStatsCache
from crate_kernels.ops.ista import op as ista_op
from crate_kernels.ops.mssa import logsumexp
from crate_kernels.ops.mssa import op as mssa_op
from crate_kernels.ops.mssa.call import MSSACall
from crate_kernels.ops.tssa import op as tssa_op
from tests.ops.common import LAYOUTS, home, interpreted, kernels, offsets, randn

pytestmark = pytest.mark.usefixtures("plain_backend")

SHAPE = (2, 3, 9, 8)
INPUTS = {
    **{name: (SHAPE, lay) for name, lay in LAYOUTS.items()},
    "no-batch": ((0, 3, 9, 8), LAYOUTS["transposed"]),
    "no-tokens": ((2, 3, 0, 8), LAYOUTS["transposed"]),
}


def draw(lay, device, *shape, seed=0):
    return lay(randn(*shape, seed=seed, dtype=torch.float32, device=device))


def mssa(lay, shape, device, packed):
    shape = (shape[0] * shape[2], *shape[1::2]) if packed else shape
    w, dout = (draw(lay, device, *shape, seed=seed) for seed in (0, 1))
    bounds = offsets((shape[0] // 2, shape[0] - shape[0] // 2)).to(device) if packed else None
    options = (None, bounds, shape[0] if packed else 0, None, True, 0.3, 0.0, None)
    out, lse = yield mssa_op.mssa_fwd, (w, *options)
    for one, other in ((dout, None), (dout, draw(lay, device, *lse.shape, seed=2)), (None, lse)):
        yield mssa_op.mssa_bwd, (one, other, w, out, lse, *options)


def mssa_lse(lay, shape, device, masked):
    w = draw(lay, device, *shape)
    mask = lay(torch.ones(shape[0], shape[2], dtype=torch.bool, device=device)) if masked else None
    call = MSSACall(key_padding_mask=mask, causal=True, scale=0.3)
    lse = yield logsumexp._lse_fwd, (w, *call)
    yield logsumexp._lse_bwd, (draw(lay, device, *lse.shape, seed=1), w, lse, *call)


def mssa_decode(lay, shape, device, packed):
    mask = torch.ones(shape[0], shape[2], dtype=torch.bool, device=device) if packed else None
    for need_lse in (False, True):
        cache = SubspaceCache(max(shape[0], 1), shape[1], 12, shape[3], device=device)
        tensors = draw(lay, device, *shape), cache.data[: shape[0]], cache.lengths[: shape[0]]
        yield mssa_op.mssa_decode, (*tensors, mask, 0, True, 0.3, need_lse)


def tssa(lay, shape, device, packed):
    nheads = shape[1]
    shape = (shape[0] * shape[2], *shape[1::2]) if packed else shape
    w, dout = (draw(lay, device, *shape, seed=seed) for seed in (0, 1))
    temp = draw(lay, device, nheads, seed=3)
    bounds = offsets((shape[0] // 2, shape[0] - shape[0] // 2)).to(device) if packed else None
    options = (None, bounds, shape[0] if packed else 0, None, 0.0, 0)
    _, *saved = yield tssa_op.tssa_fwd, (w, temp, *options)
    for dmembership in (None, draw(lay, device, *saved[0].shape, seed=2)):
        yield tssa_op.tssa_bwd, (dout, dmembership, w, temp, *saved, *options)
    for bias in (None, draw(lay, device, nheads, shape[0] if packed else shape[2], seed=4)):
        for call in (options, (*options[:-1], 4)):  # the distance between sums
            _, *saved = yield tssa_op.tssa_causal_fwd, (w, temp, bias, *call)
            yield tssa_op.tssa_causal_bwd, (dout, torch.ones_like(saved[0]), w, temp, bias, *saved, *call)


def tssa_decode(lay, shape, device, packed):
    cache = TokenStatsCache(max(shape[0], 1), shape[1], shape[3], device=device)
    mask = torch.ones(shape[0], shape[2], dtype=torch.bool, device=device) if packed else None
    temp, bias = draw(lay, device, shape[1], seed=3), draw(lay, device, shape[1], 12, seed=4)
    state = (t[: shape[0]] for t in cache._tensors())
    yield tssa_op.tssa_decode, (draw(lay, device, *shape), temp, bias, *state, mask)


def tokens_of_ista(lay, shape, device, few):
    """Draw pairs in x's shape: (total, dim), which keeps its strides, and more; few tokens take other products."""
    rows = [(3 if few else shape[0] * shape[2], 8), (shape[0], 1 if few else 9, 8)]
    return [[draw(lay, device, *sizes, seed=seed) for seed in (0, 1)] for sizes in rows]


def ista(lay, shape, device, few):
    weight = draw(lay, device, 8, 8, seed=2)
    for (x, dy), nonnegative in itertools.product(tokens_of_ista(lay, shape, device, few), (True, False)):
        options = (0.1, 0.1, nonnegative, torch.float32)
        y = yield ista_op.ista_fwd, (x, weight, *options)
        for needs in ((True, True), (True, False), (False, True)):
            yield ista_op.ista_bwd, (dy, x, weight, y, *needs, *options)


def ista_overcomplete(lay, shape, device, few):
    weight, decoder = (draw(lay, device, 8, 20, seed=seed) for seed in (2, 3))
    for (x, dout), steps, own in itertools.product(tokens_of_ista(lay, shape, device, few), (1, 3), (None, decoder)):
        yield ista_op.ista_overcomplete_fwd, (x, weight, own, False, 0.1, 0.1, steps)
        _, *saved = yield ista_op.ista_overcomplete_fwd, (x, weight, own, True, 0.1, 0.1, steps)
        yield ista_op.ista_overcomplete_bwd, (dout, x, weight, own, *saved, 0.1, 0.1, steps)


CALLS = {
    "mssa": (mssa, ["plain", *kernels("mssa")]),
    "mssa-lse": (mssa_lse, ["composite"]),
    "mssa-decode": (mssa_decode, ["composite", *kernels("mssa")]),
    "tssa": (tssa, ["composite", *kernels("tssa")]),
    "tssa-decode": (tssa_decode, ["composite", *kernels("tssa")]),
    "ista": (ista, ["composite", *kernels("ista")]),
    "ista_overcomplete": (ista_overcomplete, ["composite", *kernels("ista")]),
}


def outputs(result):
    return result if isinstance(result, tuple) else (result,)


def described(result):
    """Return shape, dtype and strides of every output; a stride that addresses nothing is left out."""
    return [
        (tuple(t.shape), t.dtype, {d: t.stride(d) for d, size in enumerate(t.shape) if size > 1 and t.numel()})
        for t in outputs(result)
    ]


def inputs_for(backend, found):
    """Yield inputs of a backend, and marks: a call takes seconds in the interpreter, and fakes are of no backend."""
    for place, inputs in enumerate(INPUTS):
        if inputs in ("transposed", "no-batch") or not interpreted(backend, home(backend)):
            beside = backend == found[0] and len(found) > 1
            yield inputs, pytest.mark.exhaustive if beside and place % 2 else ()


@pytest.mark.parametrize(
    ("name", "backend", "shape", "lay"),
    [
        pytest.param(name, backend, *INPUTS[inputs], id=f"{name}-{backend}-{inputs}", marks=marks)
        for name, (_, found) in CALLS.items()
        for backend in found
        for inputs, marks in inputs_for(backend, found)
    ],
)
def test_outputs_are_as_their_fakes_say(name, backend, shape, lay):
    if name.endswith("decode"):
        shape = (*shape[:2], max(shape[2], 1), shape[3])  # the public functions append nothing else
    wrong, fakes = [], FakeTensorMode()
    for other in (False, True):
        steps = CALLS[name][0](lay, shape, home(backend), other)
        result, named = None, () if name == "mssa-lse" else (backend,)  # only composite has it
        while True:
            try:
                op, args = steps.send(result)
            except StopIteration:
                break
            with fakes:
                declared = described(
                    op(*(fakes.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args), *named)
                )
            with torch.no_grad():
                result = getattr(torch.ops.crate_kernels, op.__name__).default(*args, *named)
            if described(result) != declared or not all(t._base is None for t in outputs(result)):
                wrong.append((op.__name__, other, described(result), declared))
    assert wrong == []
