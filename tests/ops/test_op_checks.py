"""Ops refuse wrong tensors: those that autograd and caches hand back may have changed."""

import re

import pytest
import torch

import crate_kernels
from crate_kernels._core import backends
from crate_kernels._native import extension
from crate_kernels.nn import _linear
from crate_kernels.ops.ista import op as ista_op
from crate_kernels.ops.mssa import logsumexp
from crate_kernels.ops.mssa import op as mssa_op
from crate_kernels.ops.mssa.rectangular import op as rectangular_op
from crate_kernels.ops.tssa import op as tssa_op
from crate_kernels.ops.tssa.call import TSSACall
from tests.ops.common import NEEDS_EXTENSION, kernels, offsets, randn, seldom

BATCH, NHEADS, SEQLEN, HEAD_DIM, NEW, ROWS, HIDDEN = 2, 3, 5, 16, 2, 4, 24
OTHER = {
    torch.float64: torch.float32,
    torch.float32: torch.bfloat16,
    torch.bool: torch.uint8,
    torch.int32: torch.int64,
    torch.int64: torch.int32,
}

# In words of ours, but for what allocating and clearing results says before a kernel is asked.
SAYS = re.compile(
    r"must be (contiguous|.*, got)|too many values to unpack|cannot be converted to Scalar|Tensor.item\(\)"
)


def floats(*shape):
    return randn(*shape, dtype=torch.float32)


def packed_sizes(packed):
    tokens = (SEQLEN, NHEADS, HEAD_DIM) if packed else (BATCH, NHEADS, SEQLEN, HEAD_DIM)
    return tokens, ((NHEADS, SEQLEN) if packed else (BATCH, NHEADS, SEQLEN))


def options(packed):
    return {
        "key_padding_mask": None if packed else torch.ones(BATCH, SEQLEN, dtype=torch.bool),
        "cu_seqlens": offsets((2, 3)) if packed else None,
        "max_seqlen": 3 if packed else 0,
        "seed": torch.tensor(7),
        "causal": False,
        "scale": 0.25,
        "dropout_p": 0.5,
        "sums_every": 0,
        "threshold": None,
    }


def mssa(packed=False):
    tokens, rows = packed_sizes(packed)
    names = {"w": tokens, "out": tokens, "dout": tokens, "dw": tokens, "lse": rows, "dlse": rows, "delta": (2, *rows)}
    return {**{name: floats(*shape) for name, shape in names.items()}, **options(packed)}


def tssa(packed=False):
    tokens, rows = packed_sizes(packed)
    channels = (BATCH, NHEADS, HEAD_DIM)
    names = {"w": tokens, "dout": tokens, "out": tokens, "dw": tokens, "membership": rows, "dmembership": rows}
    bias = (NHEADS, 3 if packed else SEQLEN)
    names |= {"temp": (NHEADS,), "denom_bias": bias, "ddenom_bias": bias, "dlogit": rows}
    names |= {"energy": channels, "moment": channels, "dtemp": (NHEADS,)}
    unused = dict.fromkeys(("sums_1", "sums_2", "sums_3", "mass", "lengths"))
    return {**{name: floats(*shape).abs() for name, shape in names.items()}, **options(packed), **unused}


def full(packed=False):
    return {**tssa(packed), "denom_bias": None, "ddenom_bias": None, "causal": False}


def causal(packed=False):
    changes = {**tssa(packed), "causal": True, "energy": None, "moment": None, "sums_every": 1 if packed else 2}
    options = TSSACall(**{name: changes[name] for name in ("cu_seqlens", "max_seqlen", "sums_every")})
    return {**changes, "sums": options.empty_sums(changes["w"]).zero_()}


def tssa_cache():
    channels = (BATCH, NHEADS, HEAD_DIM)
    state = {"energy": floats(*channels), "weighted": floats(*channels), "mass": floats(BATCH, NHEADS)}
    state = {name: t.abs().double() for name, t in state.items()} | {"lengths": torch.zeros(BATCH, dtype=torch.int32)}
    values = {**causal(), "seed": None, "dropout_p": 0.0}
    return {**values, **state, "moment": state["weighted"]}


def mssa_cache():
    tokens = (BATCH, NHEADS, NEW, HEAD_DIM)
    data = floats(BATCH, NHEADS, 7, HEAD_DIM)
    state = {"data": data, "lengths": torch.full((BATCH,), 3, dtype=torch.int32), "bound": 3, "uniform": True}
    own = {"w": floats(*tokens), "out": floats(*tokens), "lse": floats(BATCH, NHEADS, NEW), "need_lse": True}
    mask = torch.ones(BATCH, NEW, dtype=torch.bool)
    return {**state, **own, "key_padding_mask": mask, "scale": 0.25, "part": None, "statistics": None}


def rectangular():
    own, others = (BATCH, NHEADS, ROWS), (BATCH, NHEADS, SEQLEN)
    names = {"rows": (*own, HEAD_DIM), "dout": (*own, HEAD_DIM), "out": (*own, HEAD_DIM), "dw": (*own, HEAD_DIM)}
    names |= {"columns": (*others, HEAD_DIM), "column_dout": (*others, HEAD_DIM)}
    names |= {name: own for name in ("lse", "delta", "dlse")} | {
        f"column_{n}": others for n in ("lse", "delta", "dlse")
    }
    masks = {name: torch.ones(BATCH, n, dtype=torch.bool) for name, n in (("row_mask", ROWS), ("column_mask", SEQLEN))}
    values = {**options(False), "row_start": 0, "column_start": 0, "first_head": 0, "nheads": 0}
    return {**{name: floats(*shape) for name, shape in names.items()}, **masks, **values}


def ista(square=True):
    dim, hidden, tokens = HEAD_DIM, HEAD_DIM if square else HIDDEN, (BATCH, SEQLEN, HEAD_DIM)
    names = {"x": tokens, "y": tokens, "dy": tokens, "dout": tokens, "weight": (dim, hidden), "decoder": (dim, hidden)}
    names |= {"codes": (2, BATCH * SEQLEN, hidden), "residuals": (1, BATCH * SEQLEN, dim)}
    numbers = {"step_size": 0.1, "lambd": 0.1, "nonnegative": True, "compute": torch.float32, "steps": 2}
    flags = {"need_dx": True, "need_dweight": True, "keep": True}
    return {**{name: floats(*shape) for name, shape in names.items()}, **numbers, **flags}


def linear():
    needs = dict.fromkeys(("need_dx", "need_dweight", "need_dbias"), True)
    return {"x": floats(BATCH, SEQLEN, 8), "weight": floats(HIDDEN, 8), "dy": floats(BATCH, SEQLEN, HIDDEN), **needs}


def few():
    tokens, square = ("x", "dy", "y", "out", "dx"), ("weight", "dweight")
    tensors = {name: floats(5, 32) for name in tokens} | {name: floats(32, 32) for name in square}
    return {**tensors, "step_size": 0.1, "threshold": 0.1, "nonnegative": True}


def passes():
    names = dict.fromkeys(("product", "base", "gate", "out", "gated", "a", "b", "both"), (HEAD_DIM, HEAD_DIM))
    numbers = {"scale": 0.5, "threshold": 0.1, "nonnegative": True}
    return {**{name: floats(*shape) for name, shape in names.items()}, **numbers}


# Entry point: operator, op, good arguments, and changes of an argument that give another good call.
WITH_TEMP = {"w": "dtype short-3 long-3"}
SEQUENCES = {"cu_seqlens": "short-0 long-0"}  # fewer or more sequences
ENTRIES = {
    "mssa_fwd": ("mssa", mssa_op.mssa_fwd, mssa, {"w": "dtype short-1 long-1 short-3 long-3"}),
    "mssa_fwd-packed": ("mssa", mssa_op.mssa_fwd, lambda: mssa(True), {
        "w": "dtype short-0 long-0 short-1 long-1 short-2 long-2", **SEQUENCES}),
    "mssa_bwd": ("mssa", mssa_op.mssa_bwd, mssa, {}),
    "mssa_bwd-packed": ("mssa", mssa_op.mssa_bwd, lambda: mssa(True), SEQUENCES),
    "mssa_decode": ("mssa", mssa_op.mssa_decode, mssa_cache, {"data": "short-2 long-2"}),
    "mssa_rectangular_fwd": (rectangular_op.PART, rectangular_op.mssa_rectangular_fwd, rectangular, {}),
    "mssa_rectangular_delta": (rectangular_op.PART, rectangular_op.mssa_rectangular_delta, rectangular, {}),
    "mssa_rectangular_bwd": (rectangular_op.PART, rectangular_op.mssa_rectangular_bwd, rectangular, {}),
    "tssa_fwd": ("tssa", tssa_op.tssa_fwd, full, WITH_TEMP),
    "tssa_fwd-packed": ("tssa", tssa_op.tssa_fwd, lambda: full(True), {
        "w": "dtype short-0 long-0 short-2 long-2", **SEQUENCES}),
    "tssa_bwd": ("tssa", tssa_op.tssa_bwd, full, {}),
    "tssa_bwd-packed": ("tssa", tssa_op.tssa_bwd, lambda: full(True), {}),
    "tssa_causal_fwd": ("tssa", tssa_op.tssa_causal_fwd, causal, {**WITH_TEMP, "denom_bias": "long-1"}),
    "tssa_causal_bwd": ("tssa", tssa_op.tssa_causal_bwd, causal, {"denom_bias": "long-1"}),
    "tssa_causal_bwd-packed": ("tssa", tssa_op.tssa_causal_bwd, lambda: causal(True), {"denom_bias": "long-1"}),
    "tssa_decode": ("tssa", tssa_op.tssa_decode, tssa_cache, {"w": "dtype", "denom_bias": "short-1 long-1"}),
    "ista_fwd": ("ista", ista_op.ista_fwd, ista, {"x": "dtype rank short-0 long-0 short-1 long-1"}),
    "ista_bwd": ("ista", ista_op.ista_bwd, ista, {}),
    "ista_overcomplete_fwd": ("ista", ista_op.ista_overcomplete_fwd, lambda: ista(False), {
        "x": "dtype rank short-0 long-0 short-1 long-1"}),
    "ista_overcomplete_bwd": ("ista", ista_op.ista_overcomplete_bwd, lambda: ista(False), {}),
    "mssa_lse_fwd": ("lse", logsumexp._lse_fwd, mssa, {"w": "dtype short-1 long-1 short-3 long-3"}),
    "mssa_lse_bwd": ("lse", logsumexp._lse_bwd, mssa, {"w": "dtype short-3 long-3"}),
    "linear_bwd": ("linear", _linear._backward_op, linear, {}),
}  # fmt: skip


# Ops of the extension, whose results are arguments too.
LIBRARY = {
    "mssa_fwd": (mssa, {}),
    "mssa_fwd-packed": (lambda: mssa(True), SEQUENCES),
    "mssa_bwd": (mssa, {}),
    "mssa_bwd-packed": (lambda: mssa(True), SEQUENCES),
    "mssa_decode": (mssa_cache, {"data": "short-2 long-2"}),
    "mssa_rectangular_fwd": (rectangular, {}),
    "mssa_rectangular_delta": (rectangular, {}),
    "mssa_rectangular_bwd": (rectangular, {}),
    "tssa_fwd": (full, {}),
    "tssa_fwd-packed": (lambda: full(True), {}),
    "tssa_fwd-causal": (causal, {"denom_bias": "long-1"}),
    "tssa_fwd-cache": (tssa_cache, {"denom_bias": "short-1 long-1"}),
    "tssa_bwd": (full, {}),
    "tssa_bwd-packed": (lambda: full(True), {}),
    "tssa_fwd-causal-packed": (lambda: causal(True), {"denom_bias": "long-1", **SEQUENCES}),
    "tssa_bwd-causal": (causal, {}),
    "tssa_bwd-causal-packed": (lambda: causal(True), SEQUENCES),
    "ista_update": (passes, dict.fromkeys(("product", "base", "gate", "out", "gated"), "dtype rank")),
    "ista_subtract_symmetric": (passes, {"out": "dtype rank"}),
    "ista_add_transposed": (passes, {"out": "dtype rank"}),
    "ista_few_fwd": (few, {}),
    "ista_few_bwd": (few, {}),
    "transpose": (lambda: {"a": floats(3, 5), "out": floats(5, 3)}, {}),
}


def wrong(t):
    """Yield changes of a tensor, by name, after which it fits no longer; None stands for its absence."""
    yield "none", None
    yield "dtype", t.to(OTHER[t.dtype])
    if t.is_floating_point():
        yield "integer", t.int()
    yield "rank", t.unsqueeze(0)
    yield "device", t.to("meta")
    for d, size in enumerate(t.shape):
        yield f"short-{d}", t.narrow(d, 0, size - 1)
        yield f"long-{d}", torch.cat((t, t.narrow(d, 0, 1)), d)


def refusal(function, args):
    """Return the error that a call ends with; None if it has a result."""
    try:
        function(*args)
    except (RuntimeError, ValueError, TypeError, AttributeError, AssertionError) as error:
        return error
    return None


def accepted(function, schema, values, good):
    """Return the changes of one argument that a call does not refuse, or not in the words for it."""
    found = []
    for argument in schema.arguments:
        value = values.get(argument.name)
        if not isinstance(value, torch.Tensor):
            continue
        for name, changed in wrong(value):
            optional = changed is None and "Optional" in str(argument.type)
            if optional or name in good.get(argument.name, "").split():
                continue
            args = copied({**values, argument.name: changed}.get(a.name) for a in schema.arguments)
            error = refusal(function, args)
            explained = isinstance(error, (RuntimeError, ValueError)) and SAYS.search(str(error))
            if error is None or (changed is not None and not explained):
                found.append(f"{argument.name} {name}: {error!r}")
    return found


def copied(values):
    return [v.clone() if isinstance(v, torch.Tensor) else v for v in values]


@pytest.fixture
def chosen(request):
    """Return the backend of this name; the emulated one is registered first."""
    if request.param == "emulated":
        request.getfixturevalue("backend")
    return request.param


NAMES = sorted({*kernels("mssa"), "composite", *(() if backends._INTERPRETED else ("emulated",))})


@pytest.mark.parametrize("chosen", NAMES, indirect=True)
@pytest.mark.parametrize("entry", ENTRIES)
def test_an_op_refuses_each_wrong_tensor(entry, chosen):
    package, function, inputs, good = ENTRIES[entry]
    schema = getattr(torch.ops.crate_kernels, entry.partition("-")[0]).default._schema
    values = {**inputs(), "backend": chosen}
    if (package == "mssa" and chosen == "composite" and "decode" not in entry) or (
        package in ("lse", "linear") and chosen != "composite"
    ):
        pytest.skip("needs a backend that has this op")
    function(*copied(values.get(a.name) for a in schema.arguments))  # as it is, the call is good
    assert accepted(function, schema, values, good) == []


@pytest.mark.parametrize("entry", ENTRIES)
def test_no_argument_is_on_the_meta_device_alone(entry):
    # The dispatcher takes such a call for one on the meta device, and asks the fake.
    _, _, inputs, _ = ENTRIES[entry]
    overload = getattr(torch.ops.crate_kernels, entry.partition("-")[0]).default
    values = {**inputs(), "backend": "cpp"}
    for argument in overload._schema.arguments:
        if isinstance(value := values.get(argument.name), torch.Tensor):
            others = [values[a.name] for a in overload._schema.arguments if a.name != argument.name]
            if any(isinstance(v, torch.Tensor) for v in others):
                changed = {**values, argument.name: value.to("meta")}
                with pytest.raises(ValueError, match=r"must be on .*'s device"):
                    overload(*(changed.get(a.name) for a in overload._schema.arguments))


def library_call(entry):
    """Return an op of the extension, its schema, good arguments and what leaves them good."""
    name, (inputs, good) = entry.partition("-")[0], LIBRARY[entry]
    overload = getattr(torch.ops.crate_kernels_C, name).default
    return overload, overload._schema, inputs(), good


@NEEDS_EXTENSION
@pytest.mark.parametrize("entry", LIBRARY)
def test_an_op_of_the_extension_refuses_each_wrong_tensor(entry):
    extension.load()
    overload, schema, values, good = library_call(entry)
    overload(*copied(values.get(a.name) for a in schema.arguments))
    assert accepted(overload, schema, values, good) == []


W, TEMP, BIAS = floats(BATCH, NHEADS, SEQLEN, HEAD_DIM), floats(NHEADS).abs(), floats(NHEADS, SEQLEN)
X, WEIGHT, DICTIONARY = floats(BATCH, SEQLEN, HEAD_DIM), floats(HEAD_DIM, HEAD_DIM), floats(HEAD_DIM, HIDDEN)
CALLS = {
    "mssa": (lambda w, backend: crate_kernels.mssa(w, backend=backend), (W,)),
    "mssa-lse": (lambda w, backend: crate_kernels.mssa(w, return_lse=True, backend=backend)[1], (W,)),
    "tssa": (lambda w, temp, backend: crate_kernels.tssa(w, temp, backend=backend), (W, TEMP)),
    "tssa-causal": (
        lambda w, temp, bias, backend: crate_kernels.tssa(w, temp, causal=True, denom_bias=bias, backend=backend),
        (W, TEMP, BIAS),
    ),
    "ista": (lambda x, d, backend: crate_kernels.ista(x, d, backend=backend), (X, WEIGHT)),
    "ista_overcomplete": (
        lambda x, d, backend: crate_kernels.ista_overcomplete(x, d, backend=backend),
        (X, DICTIONARY),
    ),
}


def change(t, how):
    """Replace what a tensor holds, as no version counter sees."""
    t.data = {"emptied": torch.empty(0), "bfloat16": t.data.bfloat16(), "shorter": t.data[1:]}[how]


@pytest.mark.parametrize("how", seldom(["emptied", "bfloat16", "shorter"], "shorter"))
@pytest.mark.parametrize("chosen", NAMES, indirect=True)
@pytest.mark.parametrize("name", CALLS)
def test_an_input_that_is_replaced_between_the_passes_is_refused(name, chosen, how):
    if name.startswith("mssa") and chosen == "composite":
        pytest.skip("needs a backward of ours: PyTorch's attention keeps another view")
    function, inputs = CALLS[name]
    for i in range(min(len(inputs), 2)):  # of a bias the call keeps a part
        leaves = [t.clone().requires_grad_() for t in inputs]
        out = function(*leaves, backend=chosen)
        change(leaves[i], how)
        with pytest.raises((RuntimeError, ValueError), match=r"must be .*, got"):
            out.sum().backward()


@pytest.mark.parametrize("chosen", [name for name in NAMES if name != "composite"], indirect=True)
def test_offsets_that_are_emptied_between_the_passes_are_refused(chosen):
    w, offsets = W[0].transpose(0, 1).clone().requires_grad_(), torch.tensor([0, 3, W.shape[2]], dtype=torch.int32)
    out = crate_kernels.mssa(w, cu_seqlens=offsets, max_seqlen=W.shape[2], backend=chosen)
    offsets.data = torch.empty(0, dtype=torch.int32)
    with pytest.raises((RuntimeError, ValueError), match=r"cu_seqlens must be .*, got"):
        out.sum().backward()


@pytest.mark.parametrize("sizes", [(0,), (2, 3), (2, 3, 4, 5, 6)])
def test_a_cache_whose_tensors_are_replaced_is_refused(sizes):
    w, temp = torch.randn(2, 3, 1, 16), torch.ones(3)
    kept, sums = crate_kernels.SubspaceCache(2, 3, 8, 16), crate_kernels.TokenStatsCache(2, 3, 16)
    kept.data = sums.energy = torch.empty(sizes)
    with torch.no_grad(), pytest.raises(ValueError, match="mssa: cache must hold tensors of"):
        crate_kernels.mssa(w, causal=True, cache=kept)
    with torch.no_grad(), pytest.raises(ValueError, match="tssa: cache must hold tensors of"):
        crate_kernels.tssa(w, temp, causal=True, cache=sums)


@pytest.mark.parametrize("chosen", NAMES, indirect=True)
@pytest.mark.parametrize("name", CALLS)
def test_saved_tensors_that_a_hook_rounds_are_refused(name, chosen):
    function, inputs = CALLS[name]
    leaves = [t.clone().requires_grad_() for t in inputs]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16() if t.is_floating_point() else t, lambda t: t):
        out = function(*leaves, backend=chosen)
    with pytest.raises((RuntimeError, ValueError), match=r"must be .*, got|expected scalar type"):
        out.sum().backward()


@pytest.mark.parametrize("chosen", NAMES, indirect=True)
def test_lengths_out_of_range_write_nowhere_else(chosen):
    # On a GPU they cannot be read: kernels clamp them.
    for lengths in ([-3, 7], [40, 2]):
        store = torch.full((BATCH, NHEADS, 12, HEAD_DIM), 5.0)
        cache = crate_kernels.SubspaceCache(BATCH, NHEADS, 7, HEAD_DIM)
        cache.data = store[:, :, 3:10]
        cache.lengths = torch.tensor(lengths, dtype=torch.int32)
        crate_kernels.mssa(W[:, :, :1], causal=True, cache=cache, backend=chosen)
        assert (store[:, :, :3] == 5.0).all()
        assert (store[:, :, 10:] == 5.0).all()
    sums = crate_kernels.TokenStatsCache(BATCH, NHEADS, HEAD_DIM)
    sums.lengths.fill_(-9)
    crate_kernels.tssa(W[:, :, :1], TEMP, causal=True, cache=sums, denom_bias=BIAS, backend=chosen)
