"""Drawn programs on a decoding cache: appends, ragged prompts, reorder, truncate, reset, clone, and what they leave."""

import torch

from tests.apart import oracle, values
from tests.apart.call import DTYPES, KERNELS, DrawnCall, keywords
from tests.apart.mirror import follow
from tests.apart.tssa import biases, long, precise


def mssa(d, seed, kind, forced):
    """Draw a program on a SubspaceCache."""
    return _program(d, seed, kind, forced, "mssa")


def tssa(d, seed, kind, forced):
    """Draw a program on a TokenStatsCache."""
    return _program(d, seed, kind, forced, "tssa")


def drifting(d, seed, kind, forced):
    """Draw a long decode of tokens whose mean moves: a prompt, or none, and then a few tokens at a time."""
    backend, dtype = d.backend(forced)
    dtype = precise(d, dtype)
    call = DrawnCall(kind, seed, "tssa", backend, dtype, outputs=("out", "membership"), context="torch.no_grad()")
    shape = _, nheads, seqlen, head_dim = long(d, {"triton": 40, "emulated": 200}.get(backend, 3_000))
    values.tokens(d, "drifting", shape)
    values.layout(d, "w", shape, dtype, d.pick("projection", "contiguous", "sliced"))
    d.put(f"temp = torch.rand({nheads}, generator=g) + 0.5")
    values.layout(d, "temp", (nheads,), dtype, "contiguous")
    biased = d.chance(0.4)
    if biased:
        biases(d, nheads, seqlen, head_dim, dtype, False, False)
    prompt, few = d.pick(0, 0, seqlen // 2), d.pick(1, 1, 1, 7)
    lengths = f"[{prompt}] * {prompt > 0} + [{few}] * {(seqlen - prompt) // few} + [{(seqlen - prompt) % few}]"
    options = keywords(
        causal=True, denom_bias="bias" if biased else None, cache="cache", return_membership=True,
        backend=repr(backend) if backend else None,
    )  # fmt: skip
    double = "torch.float64" if dtype == "float64" else None
    call.line = (
        f"cache = TokenStatsCache(1, {nheads}, {head_dim}{keywords(dtype=double)}); "
        f"parts = [tssa(part, temp{options}) for part in w.split({lengths}, 2) if part.shape[2]]; "
        "out, membership = (torch.cat(group, 2) for group in zip(*parts))"
    )
    if backend in KERNELS and dtype == "float64":
        call.refusal = NotImplementedError, "backend="

    def equation(t, nudge):
        del nudge
        return dict(zip(call.outputs, oracle.tssa_causal(t["w"], t["temp"], t.get("bias")), strict=True))

    call.equation, call.setup = equation, d.lines
    return call


def _program(d, seed, kind, forced, op):
    backend, dtype = d.backend(forced)
    batch, nheads, head_dim = d.integer(1, 4), d.pick(1, 2, 3, 5), min(d.channels(), 72 if backend == "triton" else 256)
    capacity = d.pick(d.integer(1, 12), d.integer(8, 40), d.pick(63, 64, 65, 100))
    call = DrawnCall(kind, seed, op, backend, dtype, outputs=("out", "lse" if op == "mssa" else "membership"))
    if op == "mssa":
        d.put(f"cache = SubspaceCache({batch}, {nheads}, {capacity}, {head_dim}, dtype=torch.{dtype})")
        scale = d.pick(None, None, 1.0, -0.5, 30.0, d.uniform(0, 0.5))
        call.scale = head_dim**-0.5 if scale is None else scale
        options = {"scale": scale}
    else:
        double = "torch.float64" if dtype == "float64" else None
        d.put(f"cache = TokenStatsCache({batch}, {nheads}, {head_dim}{keywords(dtype=double)})")
        d.put(f"temp = torch.rand({nheads}, generator=g) + 0.5")
        beside = (dtype, "float32") if dtype != "float64" else (dtype,)
        values.layout(d, "temp", (nheads,), d.pick(*beside), d.pick("contiguous", "sliced"))
        biased = d.chance(0.5)
        if biased:
            wide = (nheads, 20 * capacity, 1)
            d.put(f"bias = torch.randn({wide}, generator=g) * {d.pick(0.01, 0.3)}")
            if d.chance(0.2):
                lowest = torch.finfo(torch.float32 if dtype == "float64" else DTYPES[dtype]).min
                one = d.pick("-math.inf", "-math.inf", f"{lowest / 2}", "1e4")
                d.put(f"bias[{d.integer(1, nheads - 1)}] = {one}" if nheads > 1 else "bias[0, 0] = 9.0")
            values.layout(d, "bias", wide, d.pick(*beside), d.pick("contiguous", "sliced"))
        options = {"denom_bias": "bias" if biased else None}
    if backend in KERNELS and dtype == "float64":
        call.refusal = NotImplementedError, "backend="
    call.setup = d.lines
    d.lines = []
    lengths = [0] * batch
    for _ in range(d.integer(2, 9)):
        step = d.random.choices(
            ["append", "ragged", "overfull", "reorder", "truncate", "reset", "clone"], [10, 5, 2, 3, 3, 1, 1]
        )[0]  # fmt: skip
        if step in ("append", "ragged", "overfull"):
            _append(d, call, step, lengths, (batch, nheads, capacity, head_dim), options)
        elif step == "reorder":
            index = [d.integer(0, batch - 1) for _ in range(batch)]
            lengths[:] = [lengths[i] for i in index]
            d.put(f"index = torch.tensor({index}, dtype=torch.{d.pick('int32', 'int64')})")
            if d.chance(0.3):
                d.put("index = torch.stack([index, index - 1], 1)[:, 0]")
            d.put("cache.reorder(index)")
            _end(d, call, "reorder", index=index)
        elif step == "truncate" and op == "mssa":
            if d.chance(0.5):
                keep = [d.integer(0, capacity)] * batch
                d.put(f"cache.truncate({keep[0]})")
            else:
                keep = [d.integer(-1, capacity) for _ in range(batch)]
                d.put(f"keep = torch.tensor({keep}, dtype=torch.{d.pick('int32', 'int64')})")
                if d.chance(0.3):
                    d.put("keep = torch.stack([keep, keep * 0 - 5], 1)[:, 0]")
                d.put("cache.truncate(keep)")
            lengths[:] = [min(n, max(k, 0)) for n, k in zip(lengths, keep, strict=True)]
            _end(d, call, "truncate", keep=[max(k, 0) for k in keep])
        elif step == "reset":
            d.put("cache.reset()")
            lengths[:] = [0] * batch
            _end(d, call, "truncate", keep=[0] * batch)
        elif step == "clone":
            d.put("other, cache = cache, cache.clone()")
            _end(d, call, "clone")
    call.line = "\n".join("\n".join(step["lines"]) for step in call.steps)
    call.check = follow
    return call


def _end(d, call, kind, **facts):
    call.steps.append({"kind": kind, "lines": d.lines, **facts})
    d.lines = []


def _append(d, call, step, lengths, shape, options):
    """Append tokens to the program: the same number in each row, a ragged prompt, or more than fit."""
    batch, nheads, capacity, head_dim = shape
    free = capacity - max(lengths) if call.op == "mssa" else capacity
    if step == "overfull":
        if call.op == "tssa":
            return  # running sums are never full
        new = free + d.pick(1, 1, 5)
    elif free == 0:
        return
    else:
        new = d.pick(1, 1, 1, min(2, free), d.integer(1, free), free)
    d.put(f"w = torch.randn({batch}, {nheads}, {new}, {head_dim}, generator=g) * {d.pick(0.3, 1.0, 1.0, 4.0)}")
    if d.chance(0.2):
        d.put(f"w[{d.integer(0, batch - 1)}] = {d.pick('math.nan', 'math.inf', '-math.inf')}")
    kept = [new] * batch
    masked = step == "ragged" or (step == "overfull" and d.chance(0.2))
    if masked:
        kept = [d.integer(0, new) for _ in range(batch)] if step == "ragged" else kept
        d.put(f"mask = torch.arange({new}) < torch.tensor({[[n] for n in kept]})")
        if d.chance(0.3):
            values.far(d)
        values.stride(d, "mask", (batch, new), "bool", "True")
    values.layout(
        d, "w", (batch, nheads, new, head_dim), call.dtype, d.pick("projection", "contiguous", "sliced", "permuted")
    )
    second = d.chance(0.5)
    backend = call.backend
    if not call.refusal and d.chance(0.15):
        backend = d.pick(None, "composite", "reference")  # any backend continues a cache that another has written
    names = "out, " + call.outputs[1] if second else "out"
    temp = ", temp" if call.op == "tssa" else ""
    text = keywords(
        causal=True, cache="cache", key_padding_mask="mask" if masked else None, **options,
        **{"return_lse" if call.op == "mssa" else "return_membership": True if second else None},
        backend=repr(backend) if backend else None,
    )  # fmt: skip
    context = d.pick("", "", "", "torch.no_grad()", "torch.inference_mode()")
    line = f"{names} = {call.op}(w{temp}{text})"
    d.put(f"with {context}:\n    {line}" if context else line)
    _end(d, call, "append", outputs=call.outputs[: 1 + second], masked=masked, full=step == "overfull", backend=backend)
    if step != "overfull":
        lengths[:] = [n + k for n, k in zip(lengths, kept, strict=True)]
