"""Records that an operator's ``spec.py`` fills in for tests, ``verify`` and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """One named call of one operator.

    Attributes:
        op: the public function.
        name: unique within the op.
        shape: (batch, nheads, seqlen, head_dim) of attention, else (batch, seqlen, dim), with hidden last where codes
            are wider than tokens.
        options: keyword arguments of the public function that are not tensors.
        padding: "" for none, "right", "left", "scattered", or "row" for one fully padded row.
        lengths: packed sequences; their sum replaces batch and seqlen.
        layout: "projection" (heads cut from a linear layer's output), "contiguous" or "strided".
        magnitude: standard deviation of the drawn tokens. The default is the one of a default-initialised
            linear layer's output on LayerNormed tokens.
        special: unusual values of the tokens; "" for none, "dead channel", "faint channel", "zero token",
            "mixed norms", "common mean", "opposed padding".
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

    @classmethod
    def of(cls, op: str, name: str, *shape: int, **kwargs: Any) -> Case:
        """Return a case; keywords that are not fields become options of the call."""
        own = {key: kwargs.pop(key) for key in list(kwargs) if key in cls.__dataclass_fields__}
        return cls(op, name, shape, kwargs, **own)


@dataclass(frozen=True)
class Inputs:
    """The tensors of a case by argument name: the ``differentiable`` first arguments and the rest."""

    differentiable: dict[str, Tensor]
    others: dict[str, Any]

    def to(self, dtype: torch.dtype) -> Inputs:
        """Convert every floating tensor, without drawing again."""
        return Inputs({name: t.to(dtype) for name, t in self.differentiable.items()}, self.others)


@dataclass(frozen=True)
class Timed:
    """A case worth timing.

    Attributes:
        case: the call.
        layer: the layer of a model that makes this call.
        devices: device types on which its batch size is realistic.
        brief: whether the default run times it; the full run times every case.
        axes: names of the dimensions of ``case.shape``; "dim" of attention is nheads * head_dim.
    """

    case: Case
    layer: str
    devices: tuple[str, ...]
    brief: bool = False
    axes: tuple[str, ...] = ("batch", "nheads", "seqlen", "head_dim")

    def __str__(self) -> str:
        return self.case.name

    @property
    def seqlen(self) -> int:
        """Number of tokens per sequence."""
        return size_of(self.case.shape, self.axes, "seqlen")

    def resized(self, axis: str, size: int) -> Timed:
        """Return the same case at another size of "batch", "seqlen" or "dim"; hidden widths grow with "dim"."""
        sizes = dict(zip(self.axes, self.case.shape, strict=True))
        if axis == "dim" and "nheads" in sizes:
            sizes["nheads"] = size // sizes["head_dim"]
        else:
            if axis == "dim" and "hidden" in sizes:
                sizes["hidden"] = size * sizes["hidden"] // sizes["dim"]
            sizes[axis] = size
        shape = tuple(sizes.values())
        return replace(self, case=replace(self.case, name="x".join(map(str, shape)), shape=shape))


def size_of(shape: tuple[int, ...] | list[int], axes: tuple[str, ...], axis: str) -> int:
    """Return the size of an axis; "dim" of attention is nheads * head_dim."""
    sizes = dict(zip(axes, shape, strict=True))
    return sizes["nheads"] * sizes["head_dim"] if axis == "dim" and "nheads" in sizes else sizes[axis]


def timed(
    op: str, name: str, layer: str, shape: tuple[int, ...], batches: tuple[int | None, int | None], **kwargs: Any
) -> list[Timed]:
    """Return a case at its (CPU, GPU) batch; it is not timed on a device whose batch is None.

    The keywords ``brief`` and ``axes`` go to ``Timed``, ``magnitude`` to its case; the others are options of the call.
    """
    own = {key: kwargs.pop(key) for key in ("brief", "axes") if key in kwargs}
    return [
        Timed(Case.of(op, name, batch, *shape, **kwargs), layer, (device,), **own)
        for device, batch in zip(("cpu", "cuda"), batches, strict=True)
        if batch is not None
    ]


def timed_attention(
    op: str,
    name: str,
    layer: str,
    shape: tuple[int, int, int],
    batches: tuple[int | None, int | None],
    brief: str = "",
    **own: Any,
) -> list[Timed]:
    """Return the full and the causal form of a case; ``brief`` names the form that the default run times."""
    full = timed(op, name, layer, shape, batches, brief=brief == "full", **own)
    return full + timed(op, f"{name}-causal", layer, shape, batches, brief=brief == "causal", causal=True, **own)


def never(*_: Any) -> None:
    """Return None: the ``unavailable_reason`` of a provider that runs every case."""


@dataclass(frozen=True)
class Provider:
    """One way to compute a case.

    Attributes:
        name: printed name.
        make: returns the function of the differentiable arguments, in the public function's order.
        unavailable_reason: says why the provider cannot run (case, dtype, device); None if it can.
        inference_only: device types on which the provider has no backward pass.
    """

    name: str
    make: Callable[[Case], Function]
    unavailable_reason: Callable[[Case, torch.dtype, torch.device], str | None] = never
    inference_only: tuple[str, ...] = ()


@dataclass(frozen=True)
class TimedStep:
    """One decoding step: one new token per sequence, with ``cached`` tokens before it.

    Attributes:
        op: the operator.
        shape: (batch, nheads, cached, head_dim).
        devices: device types on which the step is timed.
        brief: whether the default run times the step.
    """

    op: str
    shape: tuple[int, int, int, int]
    devices: tuple[str, ...]
    brief: bool = False

    def __str__(self) -> str:
        batch, nheads, cached, head_dim = self.shape
        return f"{batch}x{nheads}x{head_dim}-cached-{cached}"


# (step, rewind): step returns the new token's output, rewind removes the token from the cache.
Stepper = tuple[Callable[[], Tensor], Callable[[], Any]]


@dataclass(frozen=True)
class Decoding:
    """Steps of an operator that has a cache.

    Attributes:
        steps: the timed steps.
        make: maps (step, provider, past tokens, new token) to a ``Stepper``.
        providers: names of the providers that ``make`` knows besides our backends.
        min_bytes: bytes of the cache that a step must read or write.
    """

    steps: tuple[TimedStep, ...]
    make: Callable[[TimedStep, str, Tensor, Tensor], Stepper]
    providers: tuple[str, ...]
    min_bytes: Callable[[TimedStep, torch.dtype], float]


@dataclass(frozen=True)
class Work:
    """The minimum work of a call, as (forward, backward) pairs.

    Attributes:
        flops: the customary count of floating-point operations; None if memory limits the call.
        elements: elements of inputs read once and outputs written once.
    """

    flops: tuple[float, float] | None
    elements: tuple[float, float]


@dataclass(frozen=True)
class SampledCheck:
    """Comparison of one part of a case, whose full exact results do not fit in memory.

    Attributes:
        part: returns the compared part of a tensor.
        results: returns output and gradient of that part: (part of the tokens, of the upstream gradient, case).
    """

    part: Callable[[Tensor], Tensor]
    results: Callable[[Tensor, Tensor, Case], list[Tensor]]


@dataclass(frozen=True)
class Sweep:
    """The cases whose sizes benchmarks vary.

    Attributes:
        title: title of the figures of ``base``.
        base: the case varied in seqlen.
        brief: the lengths of the default run.
        image: the case varied in batch and dim.
    """

    title: str
    base: Timed
    brief: tuple[int, ...]
    image: Timed


@dataclass(frozen=True)
class Spec:
    """Everything that tests, ``verify`` and benchmarks know about an operator.

    Attributes:
        op: the public function.
        package: the folder of the operator's kernels in ``ops/``; its name in ``backends``.
        outputs: names of the outputs.
        cases: the cases compared with float64.
        draw: returns the tensors of a case in a dtype on a device, drawn by a generator.
        published: returns the reference implementation of a case: the eager PyTorch that users run today.
        work: returns the minimum work of a case.
        tiny: returns calls on tiny tensors, of the op itself and of the public function: (device, tracked, backend).
        timed: the timed cases.
        sweep: the cases whose sizes vary; None if there are none.
        arguments: returns the tensors that benchmarks draw; those of ``draw`` by default.
        excluded: says why (case, backend, dtype) is not checked against the error tolerance; None if it is.
        providers: other providers that compute the operator.
        decoding: steps on the operator's cache; None if it has no cache.
        sampling: how exact results of long sequences are compared; None compares the whole result.
    """

    op: str
    package: str
    outputs: tuple[str, ...]
    cases: tuple[Case, ...]
    draw: Callable[[Case, torch.dtype, torch.device, torch.Generator], Inputs]
    published: Callable[[Case], Function]
    work: Callable[[Case], Work]
    tiny: Callable[[torch.device, bool, str], dict[str, Callable[[], Any]]] | None = None
    timed: tuple[Timed, ...] = ()
    sweep: Sweep | None = None
    arguments: Callable[[Case, torch.Generator], list[Tensor]] | None = None
    excluded: Callable[[Case, str, torch.dtype], str | None] = never
    providers: tuple[Provider, ...] = ()
    decoding: Decoding | None = None
    sampling: SampledCheck | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the dimensions of a timed case's shape."""
        return self.timed[0].axes
