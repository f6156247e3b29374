"""Named cases: what the tests and ``verify`` compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


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
            "common mean", "opposed padding".
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


_PLAIN = ("relu", "identity")

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
    *(
        _mssa(f"{name}pad-opposed", 2, 1, 65, 16, padding=kind, special="opposed padding", magnitude=0.1, **options)
        for name, kind, options in (
            ("", "scattered", {}),
            ("causal-", "right", {"causal": True}),
            ("dropout-", "scattered", {"dropout_p": 0.3}),
            ("threshold-", "scattered", {"phi": "threshold", "threshold": 0.03}),
        )
    ),
    _mssa("packed", 0, 3, 0, 16, lengths=(5, 0, 64, 1, 33)),
    _mssa("causal-packed", 0, 3, 0, 16, lengths=(5, 0, 64, 1, 33), causal=True),
    _mssa("packed-empty", 0, 3, 0, 16, lengths=(0, 0)),
    _mssa("dropout", 2, 3, 65, 16, dropout_p=0.3),
    _mssa("causal-dropout", 2, 3, 65, 16, dropout_p=0.3, causal=True),
    _mssa("dropout-packed", 0, 3, 0, 16, lengths=(5, 64, 33), dropout_p=0.3),
    _mssa("zero-tokens", 2, 3, 65, 16, special="zero token"),
    _mssa("mixed-norms", 2, 3, 65, 16, special="mixed norms"),
    _mssa("common-mean", 2, 3, 65, 16, special="common mean"),
    # Scores of 2600 that differ by a few: what two roundings of one weight differ by is multiplied by the mean.
    _mssa("high-mean", 2, 3, 65, 16, special="common mean", scale=10.0, magnitude=0.05),
    # One weight is all, a token's own or another's: eager subtracts from a product that very product.
    *(
        _mssa(f"{name}saturated", 1, 1, 70, 48, magnitude=40.0, special="mixed norms", **options)
        for name, options in (
            ("", {}),
            ("causal-", {"causal": True}),
            ("dropout-", {"dropout_p": 0.3}),
            ("causal-dropout-", {"dropout_p": 0.3, "causal": True}),
        )
    ),
    _mssa("threshold", 2, 3, 65, 16, phi="threshold", threshold=0.5, magnitude=2.0),
    _mssa("threshold-causal", 2, 3, 65, 16, phi="threshold", threshold=0.5, causal=True, magnitude=2.0),
    _mssa("relu", 2, 3, 65, 16, phi="relu", return_lse=False),
    _mssa("identity", 2, 3, 65, 16, phi="identity", return_lse=False),
    _mssa("identity-pad-row", 3, 2, 65, 16, phi="identity", return_lse=False, padding="row"),
    _mssa("identity-causal-pad", 2, 3, 65, 16, phi="identity", return_lse=False, causal=True, padding="right"),
    *(_mssa(f"{phi}-packed", 0, 3, 0, 16, lengths=(5, 0, 64, 1, 33), phi=phi, return_lse=False) for phi in _PLAIN),
    *(_mssa(f"{phi}-packed-empty", 0, 3, 0, 16, lengths=(0, 0), phi=phi, return_lse=False) for phi in _PLAIN),
    # The sums of w_id w_ie over tokens are beyond fp16; what eager forms, scores and outputs, is not.
    _mssa("identity-large", 1, 2, 129, 8, phi="identity", return_lse=False, scale=2**-10, magnitude=24.0),
    _mssa(
        "identity-large-pad",
        2,
        2,
        129,
        8,
        phi="identity",
        return_lse=False,
        scale=2**-10,
        magnitude=24.0,
        padding="row",
    ),
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
    if case.magnitude >= 30.0 and dtype == torch.float32:
        return (
            "PyTorch's attention rounds what cancels where one weight is all: float32 gradients err by |w|^2 scale ulp"
        )
    if case.shape[3] in (112, 128) and dtype == torch.float32:
        return "PyTorch's CPU attention has a 20-ulp exponential: float32 gradients reach 4.2x eager's error"
    return None
