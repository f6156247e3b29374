"""Calls of the kernels of whole heads and of long rows, for the emulator and for a GPU."""

import copy
from typing import ClassVar

import pytest
import torch

from crate_kernels import mssa, testing
from crate_kernels.ops.mssa.call import MSSACall
from crate_kernels.ops.mssa.cuda import heads, long_pairs, long_rows
from tests.ops.common import randn

# Tokens are so short that no weight is much above others.
CAUSAL = {"causal": True, "drawn": "short"}
# head_dim, tokens, and what else a call has. Cases of one kernel stand together: g++ takes seconds for each kernel.
CASES = {
    "197-tokens": (64, 197, {}),
    "lse": (64, 197, {"lse": True}),
    "packed": (64, 208, {"lengths": (208, 1, 17, 0, 130)}),
    "padded": (64, 197, {"kept": (197, 60, 0)}),
    "holes": (64, 200, {"kept": "holes"}),
    "one-block": (64, 50, {}),
    "a-tail-of-48": (64, 101, {"kept": (101, 33, 70)}),
    "48-channels": (48, 160, {"lse": True}),
    "40-channels": (40, 150, {}),
    "32-channels": (32, 83, {"kept": (83, 80, 1)}),
    "128-channels": (128, 139, {"lse": True}),
    "128-channels-padded": (128, 144, {"kept": (144, 90, 20)}),
    "72-channels": (72, 83, {"lse": True}),  # 72 to 112: heads of CRATE-alpha
    "104-channels": (104, 90, {"kept": (90, 33, 0)}),
    "112-channels": (112, 200, {"kept": (200, 90, 0)}),
    "causal": (64, 197, {**CAUSAL, "lse": True}),
    "causal-packed": (64, 208, {**CAUSAL, "lengths": (208, 1, 17, 0, 130)}),
    "causal-padded": (64, 197, {**CAUSAL, "kept": (197, 60, 0)}),
    "causal-holes": (64, 200, {**CAUSAL, "kept": "holes"}),
    "causal-alike": (64, 197, {**CAUSAL, "drawn": "alike"}),
    "causal-a-tail-of-48": (64, 101, {**CAUSAL, "first": 64}),
    "causal-128-channels": (128, 139, {**CAUSAL, "kept": (139, 70, 20)}),
    "causal-88-channels": (88, 101, CAUSAL),
}
# Of the forward alone: whole blocks of 64 without a tail, and more channels than its backward can take.
FORWARD_CASES = {
    "256-tokens": (64, 256, {"kept": (256, 100, 70)}),
    "a-tail-of-32": (64, 96, {}),
    "128-channels-long": (128, 250, {}),
    "causal-256-tokens": (64, 256, {**CAUSAL, "kept": (256, 100, 70)}),
    "causal-a-tail-of-32": (64, 96, {**CAUSAL}),
}
# Of long rows. A block has 192 rows of 64 channels or 128 of 128; a tile has 128 tokens, and four are on their way.
LONG_CASES = {
    "257-tokens": (64, 257, {}),
    "many-tiles": (64, 700, {"drawn": "short", "lse": True}),
    "packed": (64, 300, {"lengths": (300, 1, 129, 0, 17), "lse": True}),
    "padded": (64, 385, {"kept": (385, 200, 0)}),
    "holes": (64, 300, {"kept": "holes"}),
    "40-channels": (40, 260, {}),
    "32-channels": (32, 290, {"kept": (290, 130)}),
    "128-channels": (128, 333, {"lse": True}),
    "128-channels-many-tiles": (128, 650, {"drawn": "short"}),
    "72-channels": (72, 270, {"kept": (270, 130)}),
    "causal": (64, 400, {**CAUSAL, "lse": True}),
    "causal-packed": (64, 300, {**CAUSAL, "lengths": (300, 1, 129, 0, 17)}),
    "causal-padded": (64, 385, {**CAUSAL, "kept": (385, 200, 0)}),
    "causal-holes": (64, 300, {**CAUSAL, "kept": "holes"}),
    "causal-alike": (64, 330, {**CAUSAL, "drawn": "alike", "lse": True}),
    "causal-128-channels": (128, 390, CAUSAL),
}
# Of their backward alone: what does not fit that of whole heads.
LONG_BACKWARD_CASES = {
    "128-channels-240-tokens": (128, 240, {"lse": True}),
    "104-channels-padded": (104, 215, {"kept": (215, 100)}),
    "88-channels-packed": (88, 230, {"lengths": (230, 5, 0, 70)}),
    "causal-72-channels": (72, 256, CAUSAL),
}
_SCALED = ("long_range_kernel", "long_scale_kernel", "long_delta_kernel")
_LEFT = ("mma_left_shift_kernel", "mma_left_backward_kernel")  # heads out of range


def often(cases, names):
    """Have these cases in every run, and the others, which take seconds each, in exhaustive ones."""
    assert set(names) <= set(cases)
    return [pytest.param(one, marks=[] if one in names else [pytest.mark.exhaustive]) for one in cases]


def often_both_ways(cases, late, early):
    """Have these cases in every run whose products are made late, or at their issue."""
    ways = [(False, "at-the-wait", late), (True, "at-the-issue", early)]
    return [
        pytest.param(case, when, id=f"{case}-{name}", marks=[] if case in names else [pytest.mark.exhaustive])
        for when, name, names in ways
        for case in cases
    ]


class Heads:
    """Tokens and upstream gradients of a case; ``spread`` is how much longer the last token is than the first.

    Attributes:
        forced: what the launch tables hold where tuning found these kernels faster.
        forward_kernels, backward_kernels: the names of what is then launched, in order.
    """

    kernels, cases, batch = heads, {**CASES, **FORWARD_CASES}, 3
    forced: ClassVar = {heads.FORWARD: {"WHOLE": 1}, heads.BACKWARD: {"WHOLE": 1}}
    forward_kernels = ("head_forward_kernel", "mma_left_forward_kernel")
    backward_kernels = ("head_backward_kernel", *_LEFT)

    def __init__(self, case, dtype, spread=1.0, device="cpu"):
        self.head_dim, self.seqlen, settings = self.cases[case] if isinstance(case, str) else case
        self.lengths, self.keep, self.dlse = settings.get("lengths"), None, None
        batch = len(settings["kept"]) if isinstance(settings.get("kept"), tuple) else settings.get("batch", self.batch)
        shape = (batch, 2, self.seqlen, self.head_dim)
        if self.lengths is not None:
            shape = (sum(self.lengths), 2, self.head_dim)
        w = self.drawn(randn(*shape, seed=0), settings.get("drawn"))
        if spread != 1.0:
            w = w * torch.linspace(1.0, spread, self.seqlen).view(-1, 1)
        self.w, self.dout = w.to(device, dtype), randn(*shape, seed=1).to(device, dtype)
        self.dout[..., : settings.get("first", 0), :] = 0  # of tokens before the tail
        if settings.get("kept") == "holes":
            self.keep = (randn(batch, self.seqlen, seed=2) > 0.3).to(device)
        elif "kept" in settings:
            self.keep = (torch.arange(self.seqlen) < torch.tensor(settings["kept"])[:, None]).to(device)
        if settings.get("lse"):
            numbers = shape[:-1] if self.lengths is None else shape[1::-1]
            self.dlse = randn(*numbers, seed=3).to(device)
        self.options = {"key_padding_mask": self.keep, "causal": settings.get("causal", False)}
        if self.lengths is not None:
            bounds = torch.tensor([0, *self.lengths]).cumsum(0).int().to(device)
            self.options |= {"key_padding_mask": None, "cu_seqlens": bounds, "max_seqlen": self.seqlen}

    @staticmethod
    def drawn(w, kind):
        """Return normal tokens, or others made of them."""
        if kind == "normed":
            return torch.nn.functional.layer_norm(w.double(), w.shape[-1:])
        return {None: w, "short": 0.4 * w, "alike": 2 * w[..., :1, :] + 0.3 * w}[kind]

    def with_tokens(self, w):
        """Return the same case of other tokens."""
        other = copy.copy(self)
        other.w = w
        return other

    def expected(self, dtype):
        """Return the reference's out, lse and gradient in ``dtype``."""
        w = self.w.to(dtype).requires_grad_()
        out, lse = mssa(w, return_lse=True, backend="reference", **self.options)
        outputs, gradients = [out], [self.dout.to(dtype)]
        if self.dlse is not None:
            outputs, gradients = [*outputs, lse], [*gradients, self.dlse.to(lse.dtype)]
        (dw,) = torch.autograd.grad(outputs, w, gradients)
        return out.detach(), lse.detach(), dw

    def run(self):
        """Run the kernel on the reference's rounded out; return dw and the heads that it leaves."""
        out, lse, _ = self.expected(torch.float64)
        dlse = None if self.dlse is None else self.dlse.float()
        call = MSSACall(scale=self.head_dim**-0.5, **self.options)
        out, dw = out.to(self.w.dtype), torch.zeros_like(self.w)
        assert self.kernels.serves_backward(self.w, self.dout, out, call)
        left = self.kernels.backward(self.dout, dlse, self.w, out, lse.float(), call, dw)
        return dw, left.tolist()

    def run_forward(self):
        """Run the kernel of the forward; return out, lse and the heads that it leaves."""
        out, lse = torch.zeros_like(self.w), torch.zeros_like(self.expected(torch.float64)[1], dtype=torch.float32)
        call = MSSACall(scale=self.head_dim**-0.5, **self.options)
        assert self.kernels.serves_forward(self.w, out, call)
        return out, lse, self.kernels.forward(self.w, call, out, lse).tolist()

    def check_forward(self, out, lse):
        """Hold results to the error tolerance; return the largest share of it."""
        exact, eager, shares = self.expected(torch.float64), self.expected(self.w.dtype), []
        for name, value, index in (("out", out, 0), ("lse", lse, 1)):
            (found,) = testing.measure({name: value}, {name: eager[index]}, {name: exact[index]}, value.dtype)
            assert found.passed, found
            shares.append(found.share)
        # Eager's lse is rounded; that of the kernel is a sum of exact weights.
        torch.testing.assert_close(lse, exact[1].float(), atol=1e-5, rtol=1e-6)
        return max(shares)

    def check(self, dw):
        """Compare a gradient with the error tolerance; return its share of it."""
        dtype = self.w.dtype
        exact, eager = self.expected(torch.float64)[2], self.expected(dtype)[2]
        (found,) = testing.measure({"dw": dw}, {"dw": eager}, {"dw": exact}, dtype)
        assert found.passed, found
        return found.share


class LongRows(Heads):
    """The same of long rows."""

    kernels, cases, batch = long_rows, {**LONG_CASES, **LONG_BACKWARD_CASES}, 1
    forced: ClassVar = {long_rows.FORWARD: {"LONG": 1}, long_rows.BACKWARD: {"LONG": 1}}
    forward_kernels = ("long_measure_kernel", "long_forward_kernel", "mma_left_forward_kernel")
    backward_kernels = (*_SCALED, "long_backward_kernel", *_LEFT)


class LongPairs(LongRows):
    """The same of their backward by pairs."""

    kernels = long_pairs
    forced: ClassVar = {**LongRows.forced, long_pairs.BACKWARD: {"PAIRS": 1}}
    backward_kernels = (*_SCALED, "long_pairs_kernel", "long_round_kernel", *_LEFT)
