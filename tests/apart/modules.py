"""Drawn calls of the modules of crate_kernels.nn: operators between projections, with every parameter's gradient."""

import torch
import torch.nn.functional as F

from tests.apart import oracle, philox, values
from tests.apart.attention import sdpa_factor
from tests.apart.call import KERNELS, DrawnCall, has_cpp, keywords
from tests.apart.sparse import between


def draw(d, seed, kind, forced):
    """Draw a call of the module that ``kind`` names."""
    name = kind.removeprefix("nn ")
    backend, dtype = d.backend(forced)
    backend = None if backend == "triton" and not forced else backend
    call = DrawnCall(
        kind, seed, name, backend, dtype, lenient=backend == "reference" or "ISTA" in name or dtype == "float16"
    )
    heads, head_dim = d.integer(1, 4), d.pick(1, 3, 8, 16, 31)
    dim = heads * head_dim
    batch, seqlen = d.integer(1, 3), min(d.length(), 20 if backend == "triton" else 70)
    d.put("torch.manual_seed(0)")
    build = {"MSSA": _mssa, "TSSA": _tssa, "CausalMSSA": _mssa, "CausalTSSA": _tssa}.get(name, _sparse)
    train = build is not _sparse and d.chance(0.2)
    drop = d.pick(0.1, 0.5) if train else 0.0
    line, compute, parameters, dim, decodes = build(d, call, (heads, head_dim, dim, seqlen), drop)
    end = f".to(torch.{dtype})" if dtype != "float32" else ""
    d.put(f"module = nn.{line[:-1]}{', backend=' + repr(backend) if backend else ''}){end}{'' if train else '.eval()'}")
    for short, path in parameters.items():
        d.put(f"{short} = module.{path}")
    d.put(f"x = torch.randn({batch}, {seqlen}, {dim}, generator=g) * {d.pick(0.5, 1.0, 1.0, 5.0)}")
    values.layout(
        d,
        "x",
        (batch, seqlen, dim),
        dtype,
        d.pick("contiguous", "contiguous", "permuted", "offset"),
        True,
        between(dtype),
    )
    decodes = decodes and not drop and d.chance(0.4)
    masked = build is not _sparse and not decodes and d.chance(0.3)
    if masked:
        values.mask(d, batch, seqlen)
    call.outputs = ("out",)
    if decodes:
        parts = []
        while sum(parts) < seqlen:
            parts.append(min(d.pick(1, 1, 2, d.integer(1, seqlen)), seqlen - sum(parts)))
        call.line = (
            f"cache = module.new_cache({batch}, {seqlen + d.pick(0, 3)}); "
            f"out = torch.cat([module(part, cache=cache) for part in x.split({parts}, 1)], 1)"
        )
        call.context = "torch.no_grad()"
    else:
        call.line = f"out = module(x{', key_padding_mask=mask' if masked else ''})"
        if dtype == "float32" and d.chance(0.15):
            call.working = d.half(backend)
            call.lenient = call.lenient or call.working == "float16"  # projections overflow in it, as eager's do
            call.context = f'torch.autocast("cpu", torch.{call.working})'
        # Under autocast a projection comes last, except that ista keeps its tokens' dtype.
        values.upstream(
            d, "dout", (batch, seqlen, dim), dtype if build is _sparse else call.working or dtype, between(dtype)
        )
        call.wrt = [n for n in ("x", *parameters) if d.chance(0.8)] or ["x"]
        call.upstream = {"out": "dout"}
    if backend in KERNELS and dtype == "float64" and "'mm'" not in line:
        call.refusal = NotImplementedError, "backend="

    def equation(t, nudge):
        out = compute(t, t["x"], nudge)
        if drop and ("proj" in parameters or "tied=" in line):  # nn.Identity has no dropout
            ones = torch.ones(out.shape, dtype=getattr(torch, call.working or dtype))
            out = out * F.dropout(ones, drop).to(out.dtype)
        return {"out": out}

    call.equation, call.setup = equation, d.lines
    return call


def _split(x, weight, bias, heads):
    projected = F.linear(x, weight, bias)
    return projected.unflatten(-1, (heads, -1)).transpose(1, 2)


def _merge(out, weight, bias):
    return F.linear(out.transpose(1, 2).flatten(2), weight, bias)


def _mssa(d, call, shape, drop):
    """Draw MSSA or CausalMSSA."""
    heads, head_dim, dim, _ = shape
    scale = d.pick(None, None, 0.5, 1.0)
    crate = call.op == "MSSA"
    if crate:
        dim = d.pick(dim, d.integer(1, 40))
        tied, causal, gamma, bias_out = d.chance(0.25), d.chance(0.3), d.pick(None, 0.5), d.pick(None, None, False)
        phi = d.pick("softmax", "softmax", "softmax", "threshold", "relu", "identity")
        phi = phi if call.backend in (None, "composite") else "softmax"
        threshold = d.pick(0.1, 0.6) if phi == "threshold" else None
        options = keywords(
            dropout=drop or None, scale=scale, bias_out=bias_out, tied=tied or None, gamma=gamma if tied else None,
            phi=repr(phi) if phi != "softmax" else None, threshold=threshold, causal=causal or None,
        )  # fmt: skip
        line = f"MSSA({dim}, {heads}, {head_dim}{options})"
        plain = tied or (heads == 1 and head_dim == dim)
        names = {"qkv": "qkv.weight"} | ({} if plain else {"proj": "to_out[0].weight"})
        if not plain and bias_out is None:
            names["bias"] = "to_out[0].bias"
        call.jumps = phi in ("threshold", "relu")
    else:
        tied, causal, gamma, phi, threshold = False, True, None, "softmax", None
        line = f"CausalMSSA({dim}, {heads}{keywords(bias=d.pick(None, False), dropout=drop or None, scale=scale)})"
        names = {"qkv": "c_attn.weight", "proj": "c_proj.weight"}
        if "bias=False" not in line:
            names["bias"] = "c_proj.bias"
    factor = scale if scale is not None else 1.0 if tied else head_dim**-0.5

    def compute(t, x, nudge):
        w, factors = _split(x, t["qkv"], None, heads), None
        lacking = not has_cpp() or (call.working or call.dtype) == "float64" or phi in ("relu", "identity")
        native = call.backend == "composite" or (call.backend is None and lacking)
        if drop and native:
            factors = sdpa_factor(w.shape, call.working or call.dtype, drop)
        elif drop:
            philox.skip()
            factors = philox.attention_factor(t["seed"], drop, 0, w.shape)
        out, _ = oracle.mssa(
            w,
            causal=causal,
            scale=factor,
            factor=factors,
            phi=phi,
            threshold=threshold,
            mask=t.get("mask"),
            nudge=nudge,
        )
        if tied:
            return _merge(out, t["qkv"].T, None) * (1.0 if gamma is None else gamma)
        return _merge(out, t["proj"], t.get("bias")) if "proj" in t else out.transpose(1, 2).flatten(2)

    return line, compute, names, dim, causal and phi == "softmax"


def _tssa(d, call, shape, drop):
    """Draw TSSA or CausalTSSA."""
    heads, _, dim, seqlen = shape
    bias = d.pick(None, True, False)
    vision = call.op == "TSSA"
    if vision:
        line = f"TSSA({dim}, {heads}{keywords(qkv_bias=bias, attn_drop=drop or None, proj_drop=drop or None)})"
        names = {"qkv": "qkv.weight", "temp": "temp", "proj": "to_out[0].weight", "bias_out": "to_out[0].bias"}
        names |= {"bias_in": "qkv.bias"} if bias else {}
    else:
        line = f"CausalTSSA({dim}, {heads}, {seqlen + d.pick(0, 0, 5)}{keywords(bias=bias, dropout=drop or None)})"
        names = {"qkv": "c_attn.weight", "temp": "temp", "proj": "c_proj.weight", "denom_bias": "denom_bias"}
        names |= {} if bias is False else {"bias_in": "c_attn.bias", "bias_out": "c_proj.bias"}

    def compute(t, x, nudge):
        del nudge
        w, factors = _split(x, t["qkv"], t.get("bias_in"), heads), None
        if drop:
            philox.skip()
            factors = philox.statistics_factor(t["seed"], drop, 0, w.shape, not vision)
        options = {"factor": factors, "mask": t.get("mask")}
        if vision:
            out, _ = oracle.tssa(w, t["temp"], **options)
        else:
            out, _ = oracle.tssa_causal(w, t["temp"], t["denom_bias"], **options)
        return _merge(out, t["proj"], t.get("bias_out"))

    return line, compute, names, dim, not vision


def _sparse(d, call, shape, drop):
    """Draw ISTA or OvercompleteISTA."""
    del drop
    dim = shape[2]
    call.jumps = True
    step_size, lambd = d.pick(None, 0.3), d.pick(None, 0.0, 0.5)
    numbers = {"step_size": 0.1 if step_size is None else step_size, "lambd": 0.1 if lambd is None else lambd}
    if call.op == "ISTA":
        prox, alpha = d.pick("nonnegative", "soft", "mm"), d.pick(1.0, 0.3)
        line = f"ISTA({dim}{keywords(step_size=step_size, lambd=lambd, prox=repr(prox), alpha=alpha)})"

        def compute(t, x, nudge):
            if prox == "mm":  # CRATE Eq. 92
                v = (1 + 4 / (9 * (1 + alpha))) * (x @ t["weight"]) - 4 * numbers["lambd"] / (9 * alpha)
                return torch.where(v > nudge, v, 0.0)
            return oracle.ista(x, t["weight"], **numbers, nonnegative=prox == "nonnegative", nudge=nudge).to(x.dtype)

        return line, compute, {"weight": "weight"}, dim, False
    tied, steps, hidden = d.chance(0.5), d.integer(1, 4), d.pick(None, d.integer(1, 60))
    options = keywords(hidden=hidden, steps=steps, tied=tied or None, step_size=step_size, lambd=lambd)
    line = f"OvercompleteISTA({dim}{options})"

    def overcomplete(t, x, nudge):
        return oracle.ista_overcomplete(x, t["D"], t.get("D1"), **numbers, steps=steps, nudge=nudge).to(x.dtype)

    return line, overcomplete, {"D": "D"} | ({} if tied else {"D1": "D1"}), dim, False
