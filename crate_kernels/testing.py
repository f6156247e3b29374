"""Named cases, inputs and the error budget: shared by tests, ``verify`` and benchmarks.

A case says what is computed; ``make_inputs`` draws its tensors, ``run`` calls the public function
and takes its gradients, and ``measure`` holds the result against float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import crate_kernels
from crate_kernels import _checks

FORWARD_FACTOR, GRADIENT_FACTOR = 2.0, 3.0


@dataclass(frozen=True)
class Case:
    """One named call of one operator.

    Attributes:
        op: "mssa", "tssa", "ista" or "ista_overcomplete".
        name: unique within the op.
        shape: (batch, nheads, seqlen, head_dim), or for ista (batch, seqlen, dim), with hidden last for the
            overcomplete form.
        options: keyword arguments of the public function that are not tensors.
        padding: key padding: "" for none, "right", "left", "scattered", or "row" for one fully padded row.
        lengths: packed sequences; their sum replaces batch and seqlen.
        layout: "projection" (heads cut from a linear layer's output), "contiguous" or "strided".
        magnitude: standard deviation of the drawn tokens. The default is that of a default-initialised linear
            layer's output on LayerNormed tokens: what a projection sees.
        special: "" or what is odd about the tokens: "dead channel", "faint channel", "zero token", "mixed norms",
            "common mean".
    """

    op: str
    name: str
    shape: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    padding: str = ""
    lengths: tuple[int, ...] = ()
    layout: str = "projection"
    magnitude: float = 3**-0.5
    special: str = ""

    def __str__(self) -> str:
        return f"{self.op}-{self.name}"


def _mssa(name: str, *shape: int, **kwargs: Any) -> Case:
    own = {key: kwargs.pop(key) for key in list(kwargs) if key in Case.__dataclass_fields__}
    return Case("mssa", name, shape, {"return_lse": True, **kwargs}, **own)


def _tssa(name: str, *shape: int, **kwargs: Any) -> Case:
    own = {key: kwargs.pop(key) for key in list(kwargs) if key in Case.__dataclass_fields__}
    return Case("tssa", name, shape, {"return_membership": True, **kwargs}, **own)


MSSA_CASES = (
    *(_mssa(f"n{n}", 2, 3, n, 16) for n in (1, 63, 64, 65)),
    *(_mssa(f"causal-n{n}", 2, 3, n, 16, causal=True) for n in (1, 63, 64, 65)),
    _mssa("vit", 1, 2, 197, 64),
    _mssa("vit-small", 1, 2, 197, 48),
    _mssa("causal-long", 1, 2, 257, 32, causal=True),
    *(_mssa(f"d{d}", 1, 2, 50, d) for d in (32, 80, 88, 104, 112, 128, 256)),
    _mssa("contiguous", 2, 3, 65, 32, layout="contiguous"),
    _mssa("strided", 2, 3, 65, 32, layout="strided"),
    _mssa("scale", 2, 3, 65, 16, scale=0.5),
    *(_mssa(f"{name}-scale", 2, 3, 65, 16, scale=scale) for name, scale in (("negative", -0.3), ("zero", 0.0))),
    *(_mssa(f"causal-{n}-scale", 2, 3, 65, 16, scale=x, causal=True) for n, x in (("negative", -0.3), ("zero", 0.0))),
    _mssa("negative-scale-common-mean", 2, 3, 65, 16, scale=-0.3, special="common mean"),
    _mssa("causal-packed-negative-scale", 0, 3, 0, 16, lengths=(5, 0, 64, 1, 33), scale=-0.3, causal=True),
    _mssa("pad-right", 3, 2, 65, 16, padding="right"),
    _mssa("pad-scattered", 3, 2, 65, 16, padding="scattered"),
    _mssa("pad-row", 3, 2, 65, 16, padding="row"),
    _mssa("causal-pad-left", 3, 2, 65, 16, padding="left", causal=True),
    _mssa("causal-pad-row", 3, 2, 65, 16, padding="row", causal=True),
    _mssa("packed", 0, 3, 0, 16, lengths=(5, 0, 64, 1, 33)),
    _mssa("causal-packed", 0, 3, 0, 16, lengths=(5, 0, 64, 1, 33), causal=True),
    _mssa("packed-empty", 0, 3, 0, 16, lengths=(0, 0)),
    _mssa("dropout", 2, 3, 65, 16, dropout_p=0.3),
    _mssa("causal-dropout", 2, 3, 65, 16, dropout_p=0.3, causal=True),
    _mssa("dropout-packed", 0, 3, 0, 16, lengths=(5, 64, 33), dropout_p=0.3),
    _mssa("zero-tokens", 2, 3, 65, 16, special="zero token"),
    _mssa("mixed-norms", 2, 3, 65, 16, special="mixed norms"),
    _mssa("common-mean", 2, 3, 65, 16, special="common mean"),
    _mssa("threshold", 2, 3, 65, 16, phi="threshold", threshold=0.5, magnitude=2.0),
    _mssa("threshold-causal", 2, 3, 65, 16, phi="threshold", threshold=0.5, causal=True, magnitude=2.0),
    _mssa("relu", 2, 3, 65, 16, phi="relu", return_lse=False),
    _mssa("identity", 2, 3, 65, 16, phi="identity", return_lse=False),
    _mssa("identity-pad-row", 3, 2, 65, 16, phi="identity", return_lse=False, padding="row"),
    _mssa("identity-causal-pad", 2, 3, 65, 16, phi="identity", return_lse=False, causal=True, padding="right"),
    _mssa("empty-batch", 0, 3, 65, 16),
)

TSSA_CASES = (
    *(_tssa(f"n{n}", 2, 3, n, 16) for n in (1, 63, 64, 65)),
    *(_tssa(f"causal-n{n}", 2, 3, n, 16, causal=True) for n in (1, 63, 64, 65)),
    _tssa("vit", 1, 4, 197, 48),
    *(_tssa(f"d{d}", 1, 2, 50, d) for d in (64, 80, 128)),
    _tssa("causal-long", 1, 4, 257, 48, causal=True),
    _tssa("one-head", 2, 1, 33, 16),
    _tssa("contiguous", 2, 3, 65, 16, layout="contiguous"),
    _tssa("causal-contiguous", 2, 3, 65, 16, layout="contiguous", causal=True),
    _tssa("strided", 2, 3, 65, 16, layout="strided"),
    _tssa("pad-right", 3, 2, 65, 16, padding="right"),
    _tssa("pad-row", 3, 2, 65, 16, padding="row"),
    _tssa("causal-pad-right", 3, 2, 65, 16, padding="right", causal=True),
    _tssa("causal-pad-left", 3, 2, 65, 16, padding="left", causal=True),
    _tssa("causal-pad-row", 3, 2, 65, 16, padding="row", causal=True),
    _tssa("packed", 0, 3, 0, 16, lengths=(5, 0, 64, 1, 33)),
    _tssa("causal-packed", 0, 3, 0, 16, lengths=(5, 0, 64, 1, 33), causal=True),
    _tssa("packed-empty", 0, 3, 0, 16, lengths=(0, 0)),
    _tssa("causal-packed-empty", 0, 3, 0, 16, lengths=(0, 0), causal=True),
    _tssa("dropout", 2, 3, 65, 16, dropout_p=0.3),
    _tssa("causal-dropout", 2, 3, 65, 16, dropout_p=0.3, causal=True),
    _tssa("dropout-packed", 0, 3, 0, 16, lengths=(5, 64, 33), dropout_p=0.3),
    _tssa("dead-channel", 2, 3, 65, 16, special="dead channel"),
    _tssa("causal-dead-channel", 2, 3, 65, 16, special="dead channel", causal=True),
    _tssa("faint-channel", 2, 3, 65, 16, special="faint channel"),
    _tssa("mixed-norms", 2, 3, 65, 16, special="mixed norms"),
    _tssa("empty-batch", 0, 3, 65, 16),
    _tssa("causal-empty-batch", 0, 3, 65, 16, causal=True),
)

ISTA_CASES = (
    Case("ista", "few-tokens", (2, 5, 48)),
    Case("ista", "switch", (1, 32, 48)),  # the backward takes one product, the forward two
    Case("ista", "many-tokens", (3, 65, 48)),
    Case("ista", "one-token", (1, 1, 64)),
    Case("ista", "vit", (2, 197, 96)),
    Case("ista", "strided", (3, 65, 48), layout="strided"),
    Case("ista", "parameters", (3, 65, 48), {"step_size": 0.3, "lambd": 0.5}),
    Case("ista", "two-sided", (3, 65, 48), {"nonnegative": False, "lambd": 2.0}),
    Case("ista", "two-sided-few", (1, 9, 48), {"nonnegative": False, "lambd": 2.0}),
    Case("ista", "empty-batch", (0, 65, 48)),
    Case("ista_overcomplete", "two-steps", (3, 33, 24, 96)),
    Case("ista_overcomplete", "one-step", (3, 33, 24, 96), {"steps": 1}),
    Case("ista_overcomplete", "three-steps", (3, 33, 24, 96), {"steps": 3, "lambd": 0.2}),
    Case("ista_overcomplete", "tied", (3, 33, 24, 96), special="tied"),
    Case("ista_overcomplete", "empty-batch", (0, 33, 24, 96)),
)

CASES = (*MSSA_CASES, *TSSA_CASES, *ISTA_CASES)


def excluded(case: Case, backend: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> str | None:
    """Say why ``case`` cannot be held to the budget on ``backend``; None if it can.

    The reasons are properties of PyTorch's own attention, which ``composite`` is made of, and of Triton's interpreter,
    which runs its kernels on CPU tensors.
    """
    if backend == "triton" and dtype == torch.bfloat16 and torch.device(device).type == "cpu":
        return "Triton's interpreter computes bfloat16 wrong: make test-gpu runs it"
    if case.op != "mssa" or backend != "composite":
        return None
    if case.options.get("dropout_p"):
        return "PyTorch's attention draws its own dropout mask"
    if case.shape[3] in (112, 128) and dtype == torch.float32:
        return "PyTorch's CPU attention has a 20-ulp exponential: float32 gradients reach 4.2x eager's error"
    return None


@dataclass(frozen=True)
class Inputs:
    """The tensors of a case: ``differentiable`` first arguments and the rest, by argument name."""

    differentiable: dict[str, Tensor]
    others: dict[str, Any]

    def to(self, dtype: torch.dtype) -> Inputs:
        """Convert every floating tensor; the drawn values stay what they were."""
        return Inputs({name: t.to(dtype) for name, t in self.differentiable.items()}, self.others)


def make_inputs(case: Case, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0) -> Inputs:
    """Draw the tensors of ``case`` in ``dtype``, so that a promotion to float64 changes no value.

    Args:
        case: which call.
        dtype: dtype of the drawn tensors; temp, denom_bias and weights have it too.
        device: where they are put; they are drawn on the CPU, the same everywhere.
        seed: seed of the draw.

    Raises:
        ValueError: an ista case in which nearly every token has an activation at its threshold.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    if case.op in ("ista", "ista_overcomplete"):
        return _ista_inputs(case, dtype, torch.device(device), draw)
    batch, nheads, seqlen, head_dim = case.shape
    others: dict[str, Any] = {}
    if case.lengths:
        w = draw(sum(case.lengths), nheads, head_dim)
        offsets = torch.tensor((0, *case.lengths), device=device).cumsum(0)
        others |= {"cu_seqlens": offsets.to(torch.int32), "max_seqlen": max(case.lengths)}
    else:
        w = draw(batch, nheads, seqlen, head_dim)
    w = _make_special(w * case.magnitude, case.special)
    if case.padding:
        others["key_padding_mask"] = padding_mask(case.padding, batch, seqlen, generator).to(device)
    tensors = {"w": _lay_out(w.to(device, dtype), case.layout)}
    if case.op == "tssa":
        tensors["temp"] = (1 + 0.2 * draw(nheads, 1)).to(device, dtype)
        if case.options.get("causal"):
            longest = max(case.lengths) if case.lengths else seqlen
            tensors["denom_bias"] = (0.02 * draw(nheads, longest + 3, 1)).to(device, dtype)
    return Inputs(tensors, others)


def _ista_inputs(case: Case, dtype: torch.dtype, device: torch.device, draw: Any) -> Inputs:
    batch, seqlen, dim = case.shape[:3]
    tokens = batch * seqlen
    hidden = case.shape[3] if case.op == "ista_overcomplete" else dim
    weight = (draw(dim, hidden) * dim**-0.5).to(dtype)
    pool = draw(64 * tokens, dim).to(dtype)
    x = pool[_clear_of_kinks(case, pool.double(), weight.double(), torch.finfo(dtype).eps)][:tokens]
    if len(x) < tokens:
        raise ValueError(f"{case}: too few tokens of {case.shape} are clear of their thresholds in {dtype}")
    x = x.view(batch, seqlen, dim).to(device)
    if case.layout == "strided":
        x = x.repeat_interleave(2, -1)[..., ::2]
    tensors = {"x": x, "weight": weight.to(device)}
    if case.op == "ista_overcomplete" and case.special != "tied":
        tensors["decoder"] = (draw(dim, hidden) * dim**-0.5).to(device, dtype)
    return Inputs(tensors, {})


def _clear_of_kinks(case: Case, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Say which tokens have no activation within rounding of its threshold.

    There the gradient jumps, and a last-bit difference in the activation is no error. The distance kept is
    several times the rounding of the update, which ``step_size`` scales: ``eps`` in units of the tokens at 0.1.
    """
    step_size, lambd = case.options.get("step_size", 0.1), case.options.get("lambd", 0.1)
    if case.op == "ista":
        update = x + step_size * (x - x @ weight.T) @ weight
        size = update if case.options.get("nonnegative", True) else update.abs()
        return ((size - step_size * lambd).abs() > 10 * step_size * eps).all(-1)
    code, clear = x.new_zeros(x.shape[0], weight.shape[1]), torch.ones(x.shape[0], dtype=torch.bool)
    for _ in range(case.options.get("steps", 2)):
        update = code + step_size * (x - code @ weight.T) @ weight - step_size * lambd
        clear &= (update.abs() > 2 * eps * step_size).all(-1)
        code = update.relu()
    return clear


def padding_mask(kind: str, batch: int, seqlen: int, generator: torch.Generator) -> Tensor:
    """Draw a (batch, seqlen) bool mask, True = keep; "row" pads the last sequence entirely."""
    lengths = torch.randint(1, seqlen + 1, (batch, 1), generator=generator)
    place = torch.arange(seqlen)
    if kind == "left":
        return place >= seqlen - lengths
    if kind == "scattered":
        return torch.rand(batch, seqlen, generator=generator) < 0.6
    mask = place < lengths
    if kind == "row":
        mask[-1] = False
    return mask


def _make_special(w: Tensor, special: str) -> Tensor:
    if special == "dead channel":
        w[..., 0] = 0.0
    elif special == "faint channel":
        w[..., 0] *= 1e-12  # its energy is a normal float32, the square of its energy is none
    elif special == "zero token":
        w[..., ::7, :] = 0.0
    elif special == "mixed norms":
        # Norms from 1/8 to 8: the largest scores are far beyond what a fixed maximum would suit.
        w *= 2.0 ** torch.linspace(-3, 3, w.shape[-2])[:, None]
    elif special == "common mean":
        w += 4.0
    return w


def _lay_out(w: Tensor, layout: str) -> Tensor:
    if layout == "projection" and w.dim() == 4:
        return w.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "strided":
        wide = torch.cat([w, w], dim=-1).transpose(0, 1).contiguous().transpose(0, 1)
        return wide[..., : w.shape[-1]]
    return w


def run(case: Case, inputs: Inputs, backend: str | None, seed: int = 0) -> dict[str, Tensor]:
    """Call the public function and differentiate it; return outputs and ``d<argument>`` by name.

    Args:
        case: which call.
        inputs: its tensors; they are detached first.
        backend: as in the public function.
        seed: torch's seed before the call (dropout), and the seed of the upstream gradients.
    """
    leaves = {name: t.detach().requires_grad_() for name, t in inputs.differentiable.items()}
    torch.manual_seed(seed)
    result = getattr(crate_kernels, case.op)(**leaves, **inputs.others, **case.options, backend=backend)
    outputs = result if isinstance(result, tuple) else (result,)
    names = ("out", "lse" if case.op == "mssa" else "membership")[: len(outputs)]
    generator = torch.Generator().manual_seed(seed + 1)
    losses = []
    for output in outputs:
        # Drawn in the working dtype's precision, so that every dtype sees the same upstream values.
        upstream = torch.randn(output.shape, generator=generator).bfloat16().to(output.device, output.dtype)
        finite = output.isfinite()  # lse of a row without keys is -inf
        losses.append((torch.where(finite, output, 0.0) * upstream).sum(dtype=torch.float64))
    grads = torch.autograd.grad(sum(losses), list(leaves.values()))  # pyright: ignore
    return {
        **{name: output.detach() for name, output in zip(names, outputs, strict=True)},
        **{f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)},
    }


@dataclass(frozen=True)
class Measurement:
    """One output held against float64.

    Attributes:
        output: name of the output or gradient.
        error: largest absolute error against float64.
        eager_error: the same of ``reference`` in the same dtype.
        budget: what ``error`` may be.
        finite: whether the output is finite wherever float64 is.
    """

    output: str
    error: float
    eager_error: float
    budget: float
    finite: bool

    @property
    def passed(self) -> bool:
        """Whether the output is finite and within budget."""
        return self.finite and self.error <= self.budget


def measure(
    actual: Mapping[str, Tensor], eager: Mapping[str, Tensor], oracle: Mapping[str, Tensor], dtype: torch.dtype
) -> list[Measurement]:
    """Hold every output to ``c * (eager's error + eps(dtype) * max|oracle|)``, c = 2, or 3 for gradients.

    Args:
        actual: outputs of ``run`` under test.
        eager: outputs of ``run`` on ``reference`` in the same dtype. Where it overflows (published fp16 code
            does), its error counts as zero, which only tightens the budget.
        oracle: outputs of ``run`` on ``reference`` in float64.
        dtype: the dtype under test.
    """
    results = []
    for name, exact in oracle.items():
        error = _error(actual[name], exact)
        eager_error = _error(eager[name], exact)
        eager_error = eager_error if math.isfinite(eager_error) else 0.0
        factor = GRADIENT_FACTOR if name.startswith("d") else FORWARD_FACTOR
        largest = exact[exact.isfinite()].abs().max().item() if exact.isfinite().any() else 0.0
        budget = factor * (eager_error + torch.finfo(dtype).eps * largest)
        same = bool(torch.equal(actual[name].isfinite().cpu(), exact.isfinite().cpu()))
        results.append(Measurement(name, error, eager_error, budget, same))
    return results


def _error(actual: Tensor, exact: Tensor) -> float:
    difference = (actual.double() - exact)[exact.isfinite()].abs()
    return difference.max().item() if difference.numel() else 0.0


def check_cu_seqlens(cu_seqlens: Tensor, total: int, max_seqlen: int) -> None:
    """Check packed offsets by value, on any device; the operators do so on the CPU only.

    Args:
        cu_seqlens: (sequences + 1,) int32.
        total: number of packed tokens.
        max_seqlen: length that no sequence may exceed.

    Raises:
        ValueError: the offsets do not rise from 0 to ``total``, or a sequence is longer than ``max_seqlen``.
    """
    _checks.cu_seqlens_values("check_cu_seqlens", cu_seqlens, total, max_seqlen)
