"""Ranges of a sequence, put together by a kernel, against the whole operator in float64."""

import itertools
from typing import NamedTuple

import torch

from crate_kernels import mssa, testing
from crate_kernels._core import operator
from crate_kernels.ops.mssa import rectangular
from tests.ops.common import randn

NHEADS, HERE = 4, slice(1, 3)  # a process that has some of the heads


class Ranges(NamedTuple):
    """A call of the whole operator, and the ranges that it is cut into."""

    cuts: tuple[tuple[int, int], ...]
    options: dict
    padded: bool = False
    head_dim: int = 16
    spread: float = 1.0  # of the tokens' norms
    height: float = 0.0  # each token's score with itself, in nats: all norms are equal then

    def drawn(self, dtype, device):
        """Return w, dout and dlse of all heads, and the padding mask."""
        seqlen = max(stop for _, stop in self.cuts)
        shape = (2, seqlen, NHEADS, self.head_dim)
        w, dout = (randn(*shape, seed=s, dtype=dtype, device=device).transpose(1, 2) for s in (0, 1))
        dlse = randn(2, NHEADS, seqlen, seed=2, dtype=torch.float32, device=device)
        mask = torch.arange(seqlen, device=device).add(torch.tensor([[0], [1]], device=device)) % 5 > 1
        mask[1, : self.cuts[0][1] // 2] = False  # causal: rows without a key
        if self.height:
            scale = abs(self.options.get("scale", self.head_dim**-0.5))
            norms = w.double().norm(dim=-1, keepdim=True)
            w = (w * ((self.height / scale) ** 0.5 / norms)).to(dtype)
        return w * self.spread, dout, dlse, mask if self.padded else None


THREE = ((0, 33), (33, 35), (35, 80))
CASES = {
    "full": Ranges(THREE, {}),
    "causal": Ranges(THREE, {"causal": True}),
    "padded": Ranges(THREE, {}, padded=True),
    "causal-padded": Ranges(((0, 40), (40, 75)), {"causal": True}, padded=True),
    "causal-dropout": Ranges(((0, 40), (40, 75)), {"causal": True, "dropout_p": 0.3}),
    "dropout": Ranges(((0, 40), (40, 75)), {"dropout_p": 0.3}),
    "out-of-order": Ranges(((64, 80), (0, 32), (32, 64)), {"causal": True}),
    "empty": Ranges(((0, 6), (6, 6), (6, 41)), {"causal": True}),
    "negative-scale": Ranges(((0, 40), (40, 75)), {"scale": -0.3}),
    "causal-negative-scale": Ranges(THREE, {"scale": -0.3, "causal": True}),
    "padded-negative-scale": Ranges(THREE, {"scale": -0.3}, padded=True),
    "dropout-negative-scale": Ranges(((0, 40), (40, 75)), {"scale": -0.3, "dropout_p": 0.3}),
    "far-norms-negative-scale": Ranges(((0, 40), (40, 75)), {"scale": -0.125}, head_dim=64, spread=4.0),
    "many-channels": Ranges(((0, 20), (20, 37)), {"causal": True}, head_dim=72),
    "far-norms": Ranges(((0, 40), (40, 75)), {}, spread=4.0),
    # Each token has all of its own weight: what a backward subtracts from its products must be equal to the bit.
    "saturated": Ranges(((0, 40), (40, 75)), {}, head_dim=64, spread=4.0),
    "causal-saturated": Ranges(THREE, {"causal": True}, head_dim=48, spread=4.0),
    "dropout-saturated": Ranges(((0, 40), (40, 75)), {"dropout_p": 0.3}, head_dim=64, spread=4.0),
    # One lse for all, and so large that its rounding counts in every weight.
    "equal-norms": Ranges(((0, 40), (40, 75)), {}, head_dim=64, height=40.0),
    "equal-norms-high": Ranges(((0, 40), (40, 75)), {}, head_dim=64, height=60.0),
    "equal-norms-narrow": Ranges(THREE, {}, height=40.0),
    "equal-norms-causal": Ranges(THREE, {"causal": True}, head_dim=48, height=40.0),
    "equal-norms-negative-scale": Ranges(((0, 40), (40, 75)), {"scale": -0.125}, head_dim=64, height=40.0),
}


def whole(case, w, dout, dlse, mask):
    """Return out, lse and dw of the heads that are here, by the equations."""
    w = w.detach().requires_grad_()
    torch.manual_seed(0)
    out, lse = mssa(w, **case.options, key_padding_mask=mask, return_lse=True, backend="reference")
    finite = torch.where(lse.isfinite(), lse, 0.0)
    (dw,) = torch.autograd.grad((out, finite), w, (dout.to(w.dtype), dlse.to(lse.dtype)))
    return {name: t.detach()[:, HERE] for name, t in (("out", out), ("lse", lse), ("dw", dw))}


def together(case, w, dout, dlse, mask, backend):
    """Return the same by ranges, as the processes of a group compute them."""
    torch.manual_seed(0)
    seed = operator.draw_seed(w.device) if "dropout_p" in case.options else None
    options = {"scale": case.head_dim**-0.5, **case.options, "seed": seed}
    call = rectangular.RectangularCall(**options, first_head=HERE.start, nheads=NHEADS)
    w, dout, dlse = w[:, HERE], dout[:, HERE], dlse[:, HERE]

    def ranges(*numbers):
        tokens = rectangular.RangeTokens(0, w, mask, *numbers)
        return [tokens.part(slice(*cut)) for cut in case.cuts]

    out, lse = torch.zeros_like(w, dtype=torch.float32), torch.full_like(dlse, -torch.inf)
    for rows, columns in itertools.product(ranges(), ranges()):
        place = slice(rows.start, rows.stop)
        results = rectangular.forward(rows, columns, call, backend)
        assert all(t.dtype == torch.float32 and t.is_contiguous() for t in results)
        rectangular.merge_(out[:, :, place], lse[:, :, place], *results)
    out, low = rectangular.rounded(out, w.dtype)
    dw = torch.zeros_like(w, dtype=torch.float32)
    numbers = dout, lse, rectangular.delta(w, dout, out, lse, call, backend, low), dlse
    for rows, columns in itertools.product(ranges(*numbers), ranges(*numbers)):
        dw[:, :, rows.start : rows.stop] += rectangular.backward(rows, columns, call, backend)
    return {"out": out, "lse": lse, "dw": dw}


_judged = {}


def over_tolerance(case, dtype, backend, device):
    """Return the errors of a case by ranges; what judges it is computed once for all backends and levels."""
    key = repr(case), dtype, device
    if key not in _judged:
        w, *others = case.drawn(dtype, device)
        _judged[key] = (w, *others), *(whole(case, t, *others) for t in (w, w.double()))
    inputs, eager, exact = _judged[key]
    found = together(case, *inputs, backend)
    return [m for m in testing.measure(found, eager, exact, dtype) if not m.passed]


def gradient(w, dout, backend, **options):
    """Return the gradient of the tokens (batch, 1 or 2 heads, ...), cut into two ranges, in float64."""
    heads, seqlen, head_dim = w.shape[1:]
    case = Ranges(((0, seqlen // 2), (seqlen // 2, seqlen)), options, head_dim=head_dim)
    w, dout = (t.repeat(1, NHEADS // heads, 1, 1) for t in (w, dout))
    dw = together(case, w, dout, w.new_zeros(w.shape[:3], dtype=torch.float32), None, backend)["dw"]
    return dw.flip(1)[:, :heads].to(w.dtype).double()
