"""Drawn calls under torch.func, double backward and checkpointing: right, or refused where that is documented."""

import torch

from tests.apart import oracle, philox
from tests.apart.call import DrawnCall

_REFUSED = NotImplementedError, "use backend='reference'"


def draw(d, seed, kind, forced):
    """Draw a transformed call; every tensor is small."""
    op = kind.removesuffix(" transforms")
    op = d.pick("tssa", "causal tssa") if op == "tssa" else op
    backend, _ = d.backend(forced)
    backend = None if backend == "triton" and not forced else backend
    name = "tssa" if "tssa" in op else op
    call = DrawnCall(kind, seed, name, backend, "float32", jumps="ista" in op)
    shape = (d.integer(1, 3), d.integer(1, 3), d.integer(1, 9), d.integer(1, 9))
    dropout = 0.0
    how = d.pick("vmap", "grad", "jvp", "double", "checkpoint")
    if how == "checkpoint" and "ista" not in op and not (backend == "composite" and op == "mssa"):
        dropout = d.pick(0.0, 0.5)
    d.put(f"w = torch.randn({shape}, generator=g)")
    d.put(f"temp = torch.rand({shape[1]}, generator=g) + 0.5")
    d.put(f"bias = torch.randn({shape[1]}, {shape[2] + 2}, generator=g) * 0.1")
    d.put(f"weight = torch.randn({shape[3]}, {shape[3] + (3 if op == 'ista_overcomplete' else 0)}, generator=g) * 0.5")
    d.put(f"dout = torch.randn({shape}, generator=g)")
    d.put(f"v = torch.randn({shape}, generator=g)")
    arguments = {"mssa": "w", "tssa": "w, temp", "causal tssa": "w, temp, causal=True, denom_bias=bias"}.get(
        op, "w, weight"
    )
    text = (
        f"{name}({arguments}{f', dropout_p={dropout}' if dropout else ''}{f', backend={backend!r}' if backend else ''})"
    )
    function = f"lambda w: {text}"
    call.line = {
        "vmap": f"out = torch.func.vmap({function})(torch.stack([w, v]))",
        "grad": f"out = torch.func.grad(lambda w: ({text} * dout).sum())(w)",
        "jvp": f"out = torch.func.jvp({function}, (w,), (v,))[1]",
        "double": f"x = w.clone().requires_grad_(); f = {function}; "
        "dx, = torch.autograd.grad(f(x), x, dout, create_graph=True); "
        "out, = torch.autograd.grad(dx, x, v)",
        "checkpoint": f"import torch.utils.checkpoint as c; x = w.clone().requires_grad_(); "
        f"out, = torch.autograd.grad(c.checkpoint({function}, x, use_reentrant=False), x, dout)",
    }[how]
    if how in ("jvp", "double") and backend != "reference":
        call.refusal = _REFUSED

    def equation(t, nudge):
        def f(w):
            factor = None
            if dropout and op == "mssa":
                factor = philox.attention_factor(t["seed"], dropout, 0, shape)
            elif dropout:
                factor = philox.statistics_factor(t["seed"], dropout, 0, shape, op != "tssa")
            if op == "mssa":
                return oracle.mssa(w, scale=shape[3] ** -0.5, factor=factor)[0]
            if op == "tssa":
                return oracle.tssa(w, t["temp"], factor=factor)[0]
            if op == "causal tssa":
                return oracle.tssa_causal(w, t["temp"], t["bias"], factor=factor)[0]
            return getattr(oracle, op)(w, t["weight"], nudge=nudge)

        if how == "vmap":
            return {"out": torch.stack([f(t["w"]), f(t["v"])])}
        if how == "jvp":
            return {"out": torch.func.jvp(f, (t["w"],), (t["v"],))[1]}
        leaf = t["w"].detach().clone().requires_grad_()
        (first,) = torch.autograd.grad(f(leaf), leaf, t["dout"], create_graph=how == "double")
        if how == "double":
            (first,) = torch.autograd.grad(first, leaf, t["v"])
        return {"out": first}

    call.equation, call.setup = equation, d.lines
    return call
