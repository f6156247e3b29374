"""Drawn calls of tssa."""

import torch

from tests.apart import oracle, philox, values
from tests.apart.attention import merges, modes, packed_tokens, sizes, upstreams
from tests.apart.call import DTYPES, HALF, KERNELS, DrawnCall, keywords


def draw(d, seed, kind, forced):
    """Draw a call of tssa."""
    backend, dtype = d.backend(forced)
    shape = batch, nheads, seqlen, head_dim = sizes(d, backend, quadratic=False)
    call = DrawnCall(kind, seed, "tssa", backend, dtype, lenient=backend == "reference")
    what = kind.removeprefix("tssa ")
    if what == "drifting":
        call.dtype = dtype = precise(d, dtype)
        shape = batch, nheads, seqlen, head_dim = long(d, {"triton": 200, "emulated": 1000}.get(backend, 30_000))
    causal = d.chance(0.9 if what == "bias" else 0.5)
    dropout = d.pick(0.1, 0.5, 0.9, d.uniform(0, 0.99)) if "dropout" in what or d.chance(0.1) else 0.0
    tokens = d.pick(*values.TOKENS) if what == "tokens" or d.chance(0.25) else "randn"
    tokens = {"drifting": "drifting", "ones": "normed"}.get(what, tokens)
    mask = packed = False
    if what == "packed" or (what not in ("padding", "far padding", "drifting") and d.chance(0.12)):
        packed = True
        sizes_, offsets, longest = packed_tokens(d, tokens, shape, None)
    else:
        sizes_ = shape
        values.tokens(d, tokens, shape)
        if seqlen and (what in ("padding", "far padding") or d.chance(0.15)):
            mask = True
            values.mask(d, batch, seqlen)
            if what == "far padding":
                values.far(d)
        else:
            values.undefined(d, d.integer(0, max(batch - 1, 0)), batch)
    wrt = [name for name in ("w", "temp", "bias") if d.chance(0.8)] or ["w"]
    laid = values.layout(d, "w", sizes_, dtype, None if what == "layout" or d.chance(0.5) else "projection", "w" in wrt)
    beside = d.pick(dtype, "float32") if dtype in HALF else dtype
    temperatures(d, nheads, beside, what, "temp" in wrt)
    covered = max(longest if packed else seqlen, 1)
    bias = causal and (what == "bias" or d.chance(0.4))
    if bias:
        biases(d, nheads, covered, head_dim, beside if d.chance(0.9) else dtype, what == "bias", "bias" in wrt)
    wrt = [name for name in wrt if name != "bias" or bias] or ["w"]
    if wrt == ["w"]:
        d.put("w.requires_grad_()")
    membership = what == "membership" or d.chance(0.3)
    call.outputs = ("out", "membership") if membership else ("out",)
    rows = (nheads, sizes_[0]) if packed else shape[:3]
    call.wrt = wrt
    exact = "float64" if dtype == "float64" else "float32"
    call.upstream = upstreams(
        d, call.outputs, {"out": sizes_, "membership": rows}, {"out": dtype, "membership": exact}, what
    )  # fmt: skip
    options = keywords(
        causal=causal or None, denom_bias="bias" if bias else None, dropout_p=dropout or None,
        key_padding_mask="mask" if mask else None, cu_seqlens="bounds" if packed else None,
        max_seqlen=longest if packed else None, return_membership=True if membership else None,
        backend=repr(backend) if backend else None,
    )  # fmt: skip
    call.line = f"{', '.join(call.outputs)} = tssa(w, temp{options})"
    call.merged = not packed and merges(backend, laid, dtype)
    if what == "autocast" or d.chance(0.03):
        call.context = f'torch.autocast("cpu", torch.{d.half(backend)})'  # leaves tokens alone
    modes(d, call, what, 100, causal and not packed and seqlen > 1)
    if backend in KERNELS and dtype == "float64":
        call.refusal = NotImplementedError, "backend="

    def equation(t, nudge):
        del nudge
        w, seed_ = t["w"], t["seed"]

        def dense(w, index):
            drop = philox.statistics_factor(seed_, dropout, index, w.shape, causal) if dropout else None
            if causal:
                return oracle.tssa_causal(w, t["temp"], t.get("bias"), factor=drop, mask=t.get("mask"))
            return oracle.tssa(w, t["temp"], factor=drop, mask=t.get("mask"))

        both = oracle.per_sequence(dense, w, offsets) if packed else dense(w, 0)
        return dict(zip(("out", "membership"), both, strict=True))

    call.equation, call.setup = equation, d.lines
    return call


def precise(d, dtype):
    """Return a dtype whose rounding hides no sum over tokens, mostly."""
    return "float32" if dtype in HALF and d.chance(0.7) else dtype


def long(d, longest):
    """Return the shape of a sequence of up to ``longest`` tokens, so long that sums over them lose digits."""
    return 1, d.pick(1, 2, 3), min(d.pick(1000, 1000, 3000, 10_000, 30_000), longest), d.pick(1, 4, 16, 20)


def temperatures(d, nheads, dtype, what, grad):
    """Write ``temp``, (nheads,) or (nheads, 1)."""
    sizes_ = d.pick((nheads,), (nheads, 1))
    d.put(f"temp = torch.rand({sizes_}, generator=g) * {d.pick(1.0, 2.0)} + {d.pick(0.1, 0.5, 1.0)}")
    if what == "saturated dropout":
        d.put(f"temp = temp * {d.pick(30, 300, 3000)}")
    elif what == "temp":
        d.put(d.pick(
            "temp = -temp", "temp = temp * 0", "temp = temp * 30", "temp = temp * 1e-3", "temp = temp.sub(1)",
            f"temp[{d.integer(0, nheads - 1)}] = 0", "temp[1:2] = -math.inf",  # with one head no logit would be left
        ))  # fmt: skip
    values.layout(d, "temp", sizes_, dtype, d.pick("contiguous", "contiguous", "sliced", "offset", "expanded"), grad)


def biases(d, nheads, seqlen, head_dim, dtype, odd, grad):
    """Write ``bias``, (nheads, >= seqlen[, 1])."""
    longer = seqlen + d.pick(0, 0, 1, d.integer(1, 40))
    sizes_ = d.pick((nheads, longer), (nheads, longer, 1))
    d.put(f"bias = torch.randn({sizes_}, generator=g) * {d.pick(0.01, 0.1, 1.0)}")
    if odd:
        place = d.integer(0, seqlen - 1)
        lowest = torch.finfo(torch.float32 if dtype == "float64" else DTYPES[dtype]).min
        d.put(d.pick(  # the first head keeps its logit: a softmax needs one
            "bias[1:] = -math.inf", f"bias[1:2, {place}] = -math.inf", f"bias[1:, {place}] = -math.inf",
            f"bias[1:2] = {lowest / 2}", f"bias[1:2, {place}:] = {lowest / head_dim}", f"bias[1:, {place}] = {lowest}",
            f"bias = bias + torch.linspace(0, {d.pick(0.1, 1.0, 10.0)}, {longer}).view{(longer, *sizes_[2:])}",
            "bias[-1] = 1e4", "bias = bias * 1000", "bias = bias * 0", f"bias[:, {seqlen}:] = math.nan",
        ))  # fmt: skip
    values.layout(d, "bias", sizes_, dtype, None, grad)
