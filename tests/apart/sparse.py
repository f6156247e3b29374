"""Drawn calls of ista and ista_overcomplete."""

import torch

from tests.apart import oracle, values
from tests.apart.attention import modes
from tests.apart.call import HALF, KERNELS, DrawnCall, keywords


def between(dtype):
    """Return what lies between the elements of strided operands.

    PyTorch's bfloat16 product on a CPU with AMX reads the number after each row of an odd number of columns and
    multiplies it by zero: NaN there would be found in what the library multiplies, whoever calls it.
    """
    return "1e4" if dtype == "bfloat16" else "math.nan"


def tokens(d, name, sizes, what):
    """Write ``name``, float32 tokens."""
    d.put(f"{name} = torch.randn({sizes}, generator=g) * {d.pick(0.1, 1.0, 1.0, 3.0)}")
    if what == "values" or d.chance(0.15):
        d.put(d.pick(
            f"{name} = {name} * 0", f"{name}[..., ::2] = 0", f"{name} = {name} * 1e-6", f"{name} = {name} * 100",
            f"{name} = {name} * 10 ** (torch.rand({name}.shape[:-1] + (1,), generator=g) * 4 - 2)",
            f"{name} = -{name}.abs()",
        ))  # fmt: skip


def dictionary(d, name, dim, hidden, dtype, what, grad):
    """Write a dictionary whose columns have norms around 1, as trained and as initialised ones do."""
    d.put(f"{name} = torch.randn({dim}, {hidden}, generator=g) * {d.pick(1.0, 1.0, 0.3, 2.0) * dim**-0.5:.3g}")
    if what == "values" or d.chance(0.15):
        d.put(d.pick(
            f"{name} = {name} * 0", f"{name} = torch.eye({dim}, {hidden})", f"{name} = -{name}", f"{name}[:, 0] = 0",
            f"{name} = {name} * 10", f"{name}[0] = 0", f"{name} = torch.nn.init.orthogonal_({name}, generator=g)",
        ))  # fmt: skip
    values.layout(
        d,
        name,
        (dim, hidden),
        dtype,
        None if what == "layout" else d.pick("contiguous", "contiguous", "permuted", "sliced", "offset"),
        grad,
        between(dtype),
    )


def draw(d, seed, kind, forced):
    """Draw a call of ista or of ista_overcomplete."""
    op, what = kind.split(" ", 1)
    backend, dtype = d.backend(forced)
    call = DrawnCall(kind, seed, op, backend, dtype, lenient=True)  # half-precision products are rounded in between
    over = op == "ista_overcomplete"
    dim, hidden = d.channels(), d.channels() if over else None
    if not over and d.chance(0.05):
        dim = d.pick(257, 260, 288, 320)
    before = d.pick(
        (), (d.length(),), (d.integer(1, 4), d.length()), (2, 1, d.integer(1, 9)), (d.length(),), (d.integer(200, 700),)
    )
    rows = 1
    for size in before:
        rows *= size
    small = backend == "triton"
    while rows * dim * (hidden or dim) > (200_000 if small else 4_000_000) or (small and max(dim, hidden or 1) > 64):
        if max(dim, hidden or 1) > 40:
            dim, hidden = max(dim * 3 // 4, 1), hidden and max(hidden * 3 // 4, 1)
        else:
            before, rows = (60,), 60
    if d.chance(0.02):
        before = (0, *before[1:])
    steps = d.integer(1, 5) if over else 1
    tied = over and d.chance(0.5)
    names = ["x", "weight"] + (["decoder"] if over and not tied else [])
    wrt = [name for name in names if d.chance(0.75)] or ["weight"]
    tokens(d, "x", (*before, dim), what)
    values.layout(
        d,
        "x",
        (*before, dim),
        dtype,
        None if what == "layout" or d.chance(0.4) else "contiguous",
        "x" in wrt,
        between(dtype),
    )
    beside = "float32" if dtype in HALF and (what == "mixed" or d.chance(0.3)) else dtype
    dictionary(d, "weight", dim, hidden or dim, beside, what, "weight" in wrt)
    if "decoder" in names:
        dictionary(d, "decoder", dim, hidden, beside, what, "decoder" in wrt)
    step_size = d.pick(None, None, 0.0, 0.3, 1.0, d.uniform(0, 0.5))
    lambd = d.pick(None, None, 0.0, 0.5, 2.0, 10.0, d.uniform(0, 1))
    soft = not over and d.chance(0.3)
    values.upstream(d, "dout", (*before, dim), dtype, between(dtype), what)
    call.wrt, call.upstream = wrt, {"out": "dout"}
    options = keywords(
        step_size=step_size, lambd=lambd, nonnegative=False if soft else None,
        steps=steps if over and steps != 2 else None,
        backend=repr(backend) if backend else None,
    )  # fmt: skip
    call.line = f"out = {op}({', '.join(names)}{options})"
    if what == "autocast" or d.chance(0.03):
        within = dtype if dtype in HALF else d.half(backend)  # between two half dtypes the tokens' dtype stays
        call.context = f'torch.autocast("cpu", torch.{within})'
        call.working = within if dtype == "float32" else ""  # tokens in half precision stay what they are
    modes(d, call, what)
    if backend in KERNELS and dtype == "float64":
        call.refusal = NotImplementedError, "backend="
    call.jumps = True
    numbers = {
        "step_size": 0.1 if step_size is None else step_size,
        "lambd": 0.1 if lambd is None else lambd,
        **({"steps": steps} if over else {"nonnegative": not soft}),
    }

    def equation(t, nudge):
        x, matrices = t["x"], [t[name] for name in names[1:]]
        if over or x.dtype == torch.float16:
            matrices = [matrix.to(x.dtype) for matrix in matrices]  # products run, and overflow, in this dtype
        else:
            x = x.to(matrices[0].dtype)
        out = getattr(oracle, op)(x, *matrices, **numbers, nudge=nudge)
        return {"out": out.to(t["x"].dtype)}

    call.equation, call.setup = equation, d.lines
    return call
