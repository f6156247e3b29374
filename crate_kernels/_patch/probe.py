"""Probes that find the form which computes the same function as a module. They run on shadows of the module.

``find`` draws new parameters, and new values of every number that a form reads, in float64 on the CPU. This exposes
zero-initialised biases, stop-gradients, numbers that are equal by chance and attributes that the forward never reads.
A short sequence is compared with its gradients. Large tokens show clamps, and a long sequence shows windows. Dropout
masks are compared one by one. Both forwards must leave the module in the same state. ``same_numbers`` then runs the
chosen backend with the module's own parameters, dtype and device.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from crate_kernels._core import backends
from crate_kernels._patch.forms import PLAIN, AttentionForm, ModuleForm, SparseForm, number, tensor
from crate_kernels._patch.kinds import DROPOUTS, TENSORS, with_dropout
from crate_kernels._patch.masks import CANDIDATES, MaskMeaning
from crate_kernels._patch.shadow import KnownMasks, quiet, same_state, shadow_of

# A module may do part of its work in float32: about a dozen roundings of 1.2e-7. Another function differs by
# far more: the smallest published constant, a threshold of 0.01 on tokens of size 1, is a thousand times larger.
_SAME_FUNCTION = 1e-5
# Scores of large tokens are in the hundreds, and their rounding errors are as many times larger in the output.
_SAME_LARGE = 1e-3
# Roundings to the module's dtype between input and output: about ten in the published forward, plus the fused one's.
_ROUNDINGS = 16
_SEQLEN = 7
_LONG_SPARSE, _LONG, _LONG_MAX = 17, 129, 1100  # tokens of the long sequence; the limit where an attribute sets it
_SIZE, _LARGE = 2.0, 16.0  # standard deviation of the tokens
# Values for the numbers that a form reads. All differ, and none is a published value.
_NUMBERS = (0.15, 0.25)
_RATES = (0.2, 0.025)  # rate of the first dropout, and the increase per further dropout
_ATTRIBUTE_RATE = 0.15
_MODULE_STATE = frozenset(vars(nn.Module()))

# From (batch, seqlen) to the published forward's arguments other than the tokens, and the form's options.
_Call = Callable[[int, int], tuple[dict[str, Any], dict[str, Any]]]


_FAILED = "the probe failed"
_CHANNELS_LAST = (
    "takes (batch, height, width, channels), where patch knows tokens (batch, seqlen, channels) and maps (batch, "
    "channels, height, width): flatten the pixels outside of the module, or call the operator in it"
)


class _Difference(Exception):
    """A difference between a form and the module."""


class _Refused(Exception):
    """The published forward raised an error, which is the cause."""


def signature(module: nn.Module) -> tuple | None:
    """Return all that a module's function depends on, except parameter values; None if unknown.

    Layers of one model have the same signature, so one ``find`` serves them all.
    """
    plain = {name: value for name, value in vars(module).items() if name not in _MODULE_STATE}
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    if not all(isinstance(value, PLAIN) for value in plain.values()) or len(names) != len(list(module.parameters())):
        return None
    children = [None if child is None else signature(child) or () for child in module._modules.values()]
    if () in children:
        return None
    buffers = [None if b is None else (b.shape, b.dtype, b.cpu().numpy().tobytes()) for b in module._buffers.values()]
    shapes = [None if p is None else p.shape for p in module._parameters.values()]
    parts = (*module._parameters, *shapes, *module._buffers, *buffers, *module._modules, *children)
    return type(module), *plain.items(), *map(type, plain.values()), *parts


def find(module: nn.Module, forms: list[ModuleForm]) -> tuple[ModuleForm | None, str | None]:
    """Return the first form that computes the same function as a module, or the reason why none does."""
    reasons: list[str] = []
    with quiet(), torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.enable_grad():
        pair = _Comparison(module)
        for form in forms:
            try:
                return pair.proven(form).assuming(module), None
            except _Difference as error:
                reasons.append(f"looks like {form.kind}, but {error}")
            except _Refused as error:
                reasons.append(_failure(error.__cause__ or error))
            except Exception as error:
                reasons.append(_failure(error))
        reason = min(reasons, key=lambda reason: reason.startswith(_FAILED))
        if reason.startswith(_FAILED) and any(map(pair.takes_channels_last, forms)):
            reason = _CHANNELS_LAST
    return None, reason


class _Comparison:
    """Comparison of a module's published forward and its forms, on shadows with the same drawn parameters."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.generator = torch.Generator().manual_seed(0)
        self.drawn: dict[int, Tensor] = {}
        self.tokens: dict[tuple[int, ...], Tensor] = {}

    def proven(self, form: ModuleForm) -> ModuleForm:
        """Return a form with the dropout and the masks that the probes found; raise if it is not the module's."""
        call = without_mask()
        if form.mask is not None:
            required = inspect.signature(type(self.module).forward).parameters[form.mask.name]
            if required.default is required.empty:
                call = without_mask(**{form.mask.name: None})
        try:
            self.compare(form, call)
        except _Refused:
            masks = () if form.mask is None else tuple(self.proven_masks(form))
            if form.mask is None or not masks:
                raise
            form = replace(form, mask=replace(form.mask, absent=False))
            call = masked(form, masks[0])
            self.compare(form, call)
        if form.mask is not None:
            form = replace(form, mask=replace(form.mask, masks=tuple(self.proven_masks(form))))
        if isinstance(form, SparseForm) and not form.maps:
            form = replace(form, deep=self.takes_any_rank(form, call))
        return self.place_dropout(form, call)

    def compare(self, form: ModuleForm, call: _Call) -> None:
        """Raise _Difference unless a form and the module have equal outputs and gradients."""
        x = self.short_tokens(form)
        for training in (False, True):
            expected, actual = self.run_both(form, x, call, training)
            _require_same(expected, actual, _SAME_FUNCTION)
        leaves = [x, *(leaf for leaf in self.drawn.values() if leaf.requires_grad)]
        dout = torch.randn(actual.shape, generator=self.generator, dtype=actual.dtype)
        grads = (
            torch.autograd.grad(out, leaves, dout, allow_unused=True, materialize_grads=True)
            for out in (expected, actual)
        )
        for published, fused in zip(*grads, strict=True):
            _require_same(published, fused, _SAME_FUNCTION, "gradient")
        with torch.no_grad():
            large = self.tokens_of(form, 3, _short_seqlen(self.module), _LARGE)  # shows clamps
            _require_same(*self.run_both(form, large, call, False), _SAME_LARGE, "output of large tokens")
            self.compare_long(form, call)

    def compare_long(self, form: ModuleForm, call: _Call) -> None:
        """Compare the outputs of a long sequence, which show windows and tables of positions."""
        seqlen = _LONG_SPARSE
        if isinstance(form, AttentionForm):
            sizes = {size for p in self.drawn.values() for size in p.shape}
            counts = {n: v for n, v in vars(self.module).items() if type(v) is int and v < _LONG_MAX}
            windows = (v + 1 for n, v in counts.items() if "win" in n or v not in sizes)
            seqlen = max(_LONG, *windows, 0)
        while seqlen > _SEQLEN:
            try:
                expected, actual = self.run_both(form, self.tokens_of(form, 1, seqlen, _SIZE), call, False)
            except _Refused:  # longer than the module takes
                seqlen //= 2
            else:
                return _require_same(expected, actual, _SAME_FUNCTION, "output of a long sequence")

    def takes_any_rank(self, form: ModuleForm, call: _Call) -> bool:
        """Say if the module takes four axes as tokens, not as a feature map."""
        x = self.drawn_tokens((1, 2, 3, form.token_dim(self.module)), _SIZE)
        try:
            with torch.no_grad():
                _require_same(*self.run_both(form, x, call, False), _SAME_FUNCTION)
        except (_Difference, _Refused):
            return False
        return True

    def takes_channels_last(self, form: ModuleForm) -> bool:
        """Say if the module takes maps whose last axis is the channels."""
        with contextlib.suppress(Exception), torch.no_grad():
            x = self.drawn_tokens((2, 3, 5, form.token_dim(self.module)), _SIZE)
            out = self.shadow(form, False, (0.0, 0.0)).forward(x)
            return isinstance(out, Tensor) and out.shape == x.shape
        return False

    def place_dropout(self, form: ModuleForm, call: _Call) -> ModuleForm:
        """Return the form with dropout in the module's places; every mask is compared."""
        ways = list(with_dropout(self.module, form))
        if len(ways) == 1 and not any(isinstance(m, _DropoutNd) for m in self.module.modules()):
            return ways[0]
        # One row of a map: masks of pixels that are flattened by columns are in the same order.
        x = self.drawn_tokens(form.shape(self.module, 2, _short_seqlen(self.module), rows=1), _SIZE)
        for way in ways:
            with contextlib.suppress(_Difference, _Refused), KnownMasks(), torch.no_grad():
                _require_same(*self.run_both(way, x, call, True, _RATES), _SAME_FUNCTION)
                return way
        raise _Difference("its dropout is not the operator's")

    def proven_masks(self, form: ModuleForm) -> Iterator[MaskMeaning]:
        """Yield the meanings of a mask that agree with the module."""
        for mask in CANDIDATES:
            if mask.pairs and (form.op != "mssa" or (isinstance(form, AttentionForm) and form.causal)):
                continue
            with contextlib.suppress(Exception), torch.no_grad():
                x = self.short_tokens(form)
                _require_same(*self.run_both(form, x, masked(form, mask), False), _SAME_FUNCTION)
                if not mask.pairs:
                    expected, actual = self.run_both(form, x, masked(form, mask, empty=True), False)
                    expected = torch.where(expected.isnan(), actual, expected)
                    mask = replace(mask, empty=_difference(expected, actual, _SAME_FUNCTION) is None)
                yield mask

    def run_both(
        self, form: ModuleForm, x: Tensor, call: _Call, training: bool, rates: tuple[float, float] = (0.0, 0.0)
    ) -> tuple[Any, Tensor]:
        """Return the published output and the form's output."""
        arguments, options = call(*x.shape[:2])
        shadows = self.shadow(form, training, rates), self.shadow(form, training, rates)
        torch.default_generator.manual_seed(0)
        try:
            expected = shadows[0].forward(x, **arguments)
        except Exception as error:
            raise _Refused from error
        torch.default_generator.manual_seed(0)
        actual = form.run(shadows[1], x, "reference", options)
        if not same_state(*shadows):
            raise _Difference("its forward changes attributes of the module, which a fused one would not")
        return expected, actual

    def shadow(self, form: ModuleForm, training: bool, rates: tuple[float, float]) -> nn.Module:
        """Return a shadow with drawn parameters and numbers."""
        shadow = shadow_of(self.module, self.drawing(), training, itertools.count(*rates))
        vars(shadow).update(zip(form.numbers, _NUMBERS, strict=False))
        vars(shadow).update((name, rates[0] and _ATTRIBUTE_RATE) for name in DROPOUTS if number(shadow, name))
        return shadow

    def drawing(self) -> Callable[[str, Tensor], Tensor]:
        """Return a function that makes one shadow's tensors: shadows share parameters and nothing else."""
        own: dict[int, Tensor] = {}

        def draw(name: str, tensor: Tensor) -> Tensor:
            learned = isinstance(tensor, nn.Parameter) or name in TENSORS
            known = self.drawn if learned else own
            if id(tensor) not in known:  # tied parameters stay tied
                if learned:
                    known[id(tensor)] = nn.Parameter(_draw_weights(tensor.shape, self.generator))
                elif tensor.is_meta:
                    raise _Difference(f"its {name} has no values on the meta device: patch where it has")
                else:
                    dtype = torch.float64 if tensor.is_floating_point() else tensor.dtype
                    known[id(tensor)] = tensor.detach().to("cpu", dtype, copy=True)
            return known[id(tensor)]

        return draw

    def short_tokens(self, form: ModuleForm) -> Tensor:
        return self.tokens_of(form, 2, _short_seqlen(self.module), _SIZE)

    def tokens_of(self, form: ModuleForm, batch: int, seqlen: int, size: float) -> Tensor:
        """Return tokens, equal at each call."""
        return self.drawn_tokens(form.shape(self.module, batch, seqlen), size)

    def drawn_tokens(self, shape: tuple[int, ...], size: float) -> Tensor:
        if shape not in self.tokens:
            x = size * torch.randn(shape, generator=self.generator, dtype=torch.float64)
            self.tokens[shape] = x.requires_grad_()
        return self.tokens[shape]


def same_numbers(module: nn.Module, form: ModuleForm, backend: str | None, patched: type) -> str | None:
    """Return why the backend cannot replace a module with its parameters, dtype and device; None if it can."""
    weight = form.weight(module)
    device, dtype = weight.device, weight.dtype
    generator = torch.Generator().manual_seed(0)

    def own(name: str, tensor: Tensor) -> Tensor:
        if type(tensor) is nn.Parameter:
            return tensor
        if type(tensor) is Tensor:
            return tensor.clone()
        return _draw_weights(tensor.shape, generator).to(device, tensor.dtype)  # sharded: no process has all of it

    shadow = shadow_of(module, own, False, itertools.repeat(0.0))
    try:
        shadow.__class__ = patched
    except TypeError as error:
        return f"its class cannot be replaced: {error}"
    if device.type == "meta":
        return None
    try:
        backends.resolve(form.op, backend, device, dtype)
    except NotImplementedError as error:
        return str(error)
    threshold = _size(getattr(module, form.step[1])) if isinstance(form, SparseForm) else 0.0
    shape = form.shape(module, 2, _short_seqlen(module))
    call = without_mask() if form.mask is None or form.mask.absent else masked(form, form.mask.masks[0])
    try:
        devices = [device] if device.type == "cuda" else []
        cast = torch.autocast(device.type, enabled=False)
        with quiet(), torch.random.fork_rng(devices=devices), torch.no_grad(), cast:
            x = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(device, dtype)
            x = (1.0 + 4.0 * threshold) * x
            with torch.device(device):
                arguments, options = call(*x.shape[:2])
            expected = type(module).forward(shadow, x, **arguments)
            actual = form.run(shadow, x, backend, options)
    except Exception as error:
        return _failure(error)
    rounding = torch.finfo(dtype).eps * (x.shape[-1] ** 0.5 if dtype.itemsize > 2 else 1)
    if dtype == torch.float32 and device.type != "cpu":
        rounding = 2.0**-10  # products run in TF32 if the user has set it
    reason = _difference(expected, actual, max(_SAME_FUNCTION, _ROUNDINGS * rounding))
    return reason and f"looks like {form.kind}, but its numbers differ: {reason}"


def _size(value: Any) -> float:
    """Return the size of a number, or of the largest of a tensor."""
    return value.detach().abs().max().item() if isinstance(value, Tensor) else abs(value)


def without_mask(**arguments: None) -> _Call:
    """Return a call without a mask; ``arguments`` are those that the forward requires."""
    return lambda batch, seqlen: (arguments, {})


def masked(form: ModuleForm, mask: MaskMeaning, empty: bool = False) -> _Call:
    """Return a call with a mask that drops some keys, or all keys of one sequence; a mask of pairs is causal."""
    assert form.mask is not None
    name = form.mask.name

    def call(batch: int, seqlen: int) -> tuple[dict[str, Any], dict[str, Any]]:
        if mask.pairs:
            return {name: mask.draw(torch.ones(seqlen, seqlen, dtype=torch.bool).tril())}, {"causal": True}
        kept = torch.ones(batch, seqlen, dtype=torch.bool)
        kept[0, seqlen // 2 :: 2] = False
        kept[-1, 1 : seqlen // 2] = False
        if empty:
            kept[-1] = False
        return {name: mask.draw(kept)}, {"key_padding_mask": kept}

    return call


def _draw_weights(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Draw a parameter whose products have about the size of the tokens."""
    fan_in = shape[-1] if len(shape) in (1, 2, 3) else math.prod(shape[1:])  # 4: of a convolution
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return drawn * 0.5 / max(1, fan_in) ** 0.5


def _short_seqlen(module: nn.Module) -> int:
    positions = tensor(module, "denom_bias")
    return _SEQLEN if positions is None else min(_SEQLEN, positions.shape[1])


def _require_same(expected: Any, actual: Tensor, tolerance: float, what: str = "output") -> None:
    reason = _difference(expected, actual, tolerance, what)
    if reason is not None:
        raise _Difference(f"computes something else: {reason}")


def _difference(expected: Any, actual: Tensor, tolerance: float, what: str = "output") -> str | None:
    """Describe the difference of two tensors relative to the larger one; None if within ``tolerance``."""
    if not isinstance(expected, Tensor):
        return f"{what} is a {type(expected).__name__}"
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return f"{what} is {expected.dtype} {tuple(expected.shape)}, not {actual.dtype} {tuple(actual.shape)}"
    size = max(expected.abs().max().item(), actual.abs().max().item())
    error = (expected - actual).abs().max().item()
    return None if error <= tolerance * size else f"{what} differs by {error / size:.1e} of its size"


def _failure(error: BaseException) -> str:
    return f"{_FAILED}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
