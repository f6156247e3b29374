"""Defines ops and makes them differentiable.

``torch.library.define``/``impl`` with a fake and an outer ``autograd.Function`` costs less per call
than ``custom_op`` with ``register_autograd``, and unlike ``triton_op`` its fake is not the kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch._C._functorch import get_interpreter_stack
from torch._guards import TracingContext

from crate_kernels._core import backends, imports, op_checks, plan, vmapped

_LIB = torch.library.Library("crate_kernels", "DEF")
of_op: dict[str, Callable] = {}  # by the name of an op: what differentiates a call of it
_SCHEMA_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    bool: "bool",
    int: "SymInt",
    float: "float",
    float | None: "float?",
    str: "str",
    torch.dtype: "ScalarType",
}


def schema_of(record: type[tuple]) -> str:
    """Return the fields of an operator's NamedTuple of options as arguments of a schema."""
    return ", ".join(f"{_SCHEMA_TYPES[kind]} {name}" for name, kind in get_type_hints(record).items())


@cache
def tensor_fields(record: type[tuple]) -> tuple[str, ...]:
    """Return the names of the fields of a record that are tensors or None."""
    return tuple(name for name, kind in get_type_hints(record).items() if kind in (Tensor, Tensor | None))


def split(record: Any, args: tuple) -> tuple[tuple, Any, str]:
    """Split the arguments of an op: tensors, the record of its options and the backend."""
    count = len(record._fields)
    return args[: -count - 1], record._make(args[-count - 1 : -1]), args[-1]


def make_dispatcher(
    op: str,
    method: str,
    options_cls: Any,
    dispatch_arg: int,
    public_name: str = "",
    reorder: backends.BackendOrder | None = None,
) -> Callable:
    """Return the body of an op whose arguments are tensors, then the fields of ``options_cls``, then the backend.

    The body runs ``method(*tensors, options)`` of the backend's kernel module, with contiguous tensors in the options.
    Tensor number ``dispatch_arg`` decides the device and dtype. Messages name the public function ``public_name``, by
    default ``op``. ``reorder`` says which backends to try where none was named.
    """
    if public_name:
        backends.PUBLIC[op, method] = public_name
    fields, count = tensor_fields(options_cls), len(options_cls._fields) + 1

    def dispatch(*args: Any) -> Any:
        tensors, options, backend = args[:-count], options_cls._make(args[-count:-1]), args[-1]  # split(), inline
        for name in fields:
            option = getattr(options, name)
            if option is not None and not option.is_contiguous():
                options = options._replace(**{name: option.contiguous()})
        return backends.run(op, method, backend, tensors[dispatch_arg], *tensors, options, order=reorder)

    return dispatch


def define(
    schema: str,
    body: Callable,
    fake: Callable,
    flops: Callable | None = None,
    planned_where: Callable[[str, Tensor], bool] = backends.are_planned,
    flops_of_tensors: bool = False,
    join: vmapped.Join | None = None,
) -> Any:
    """Define ``crate_kernels::<schema>`` for every device and return the function that calls it.

    ``body`` is called without gradient and with autocast off. ``fake`` allocates the outputs, for compile, export and
    meta tensors. ``flops`` is a formula for ``torch.utils.flop_counter``, of the arguments with shapes in place of
    tensors, or if ``flops_of_tensors`` of the arguments themselves. ``planned_where`` says which calls plans may
    repeat, of the name of a backend and the first tensor. ``join`` says how one call serves ``vmap``, which else is
    a loop.
    """
    name = schema.partition("(")[0]
    parsed = torch._C.parse_schema(f"crate_kernels::{schema}")
    written = [i for i, a in enumerate(parsed.arguments) if a.alias_info is not None and a.alias_info.is_write]
    # The public function has checked what a forward gets; what a later op gets may have changed since.
    later = [(a.name, i) for i, a in enumerate(parsed.arguments) if "Tensor" in str(a.type) and name[-4:] != "_fwd"]
    planned = _planned(parsed, planned_where)

    def checked_fake(*args: Any) -> Any:
        _refuse_onnx(name)
        # It serves tensors on the meta device too, of which all must be there.
        found = [(a.device, s.name) for a, s in zip(args, parsed.arguments, strict=False) if isinstance(a, Tensor)]
        for device, argument in found:
            if device != found[0][0]:
                raise ValueError(f"{name}: {argument} must be on {found[0][1]}'s device {found[0][0]}, got {device}")
        return fake(*args)

    def compute(*args: Any) -> Any:
        for argument, place in later:
            if args[place] is not None:
                op_checks.in_memory(name, argument, args[place])
        with without_autocast(next(a for a in args if isinstance(a, Tensor))):
            result = body(*map(_materialized, args))
        return _without_base(result) if isinstance(result, Tensor) else tuple(map(_without_base, result))

    def run(args: tuple, repeats: bool) -> Any:
        result = planned(args, compute) if repeats and planned is not None and not plan.is_off() else compute(*args)
        if written:
            # Autograd refuses a saved tensor whose version changed. Kernels write to addresses: raise it here.
            torch.autograd.graph.increment_version([args[i] for i in written])
        return result

    def guarded(*args: Any) -> Any:
        _refuse_onnx(name)
        with torch.no_grad():  # autograd falls through to this function
            return run(args, repeats=nothing_intercepts(args))

    def differentiated(keys: Any, *args: Any) -> Any:
        """Serve calls in graphs, of export and of jit.trace: they have the ops, and no autograd.Function."""
        _refuse_onnx(name)
        wanted = torch.is_grad_enabled() and any([isinstance(a, Tensor) and a.requires_grad for a in args])
        if wanted and name in of_op:
            return of_op[name](*args)
        with torch._C._AutoDispatchBelowAutograd():
            return overload.redispatch(keys & torch._C._after_autograd_keyset, *args)

    def call(*args: Any) -> Any:
        return run(args, repeats=True) if nothing_intercepts(args) else overload(*args)

    _LIB.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIB.impl(name, guarded, "CompositeExplicitAutograd")
    if name.endswith("_fwd"):
        _LIB.impl(name, differentiated, "Autograd", with_keyset=True)
    else:
        _LIB.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"crate_kernels::{name}", checked_fake, lib=_LIB)
    packet = getattr(torch.ops.crate_kernels, name)
    if flops is not None:
        # Importing the counter imports Triton, or logs a warning if Triton is absent.
        counter = "torch.utils.flop_counter"
        imports.when_imported(counter, lambda module: module.register_flop_formula(packet, flops_of_tensors)(flops))
    overload, call.__name__ = packet.default, name
    if not written:
        torch.library.register_vmap(f"crate_kernels::{name}", vmapped.rule(call, join), lib=_LIB)
    call.planned = planned  # pyright: ignore[reportFunctionMemberAccess]
    return call


def _refuse_onnx(name: str) -> None:
    """Refuse an export to ONNX, which would fail later and not say what can be exported."""
    onnx = sys.modules.get("torch.onnx")  # PyTorch imports it when it is first asked for
    if onnx is not None and onnx.is_in_onnx_export():
        built = "such as models.from_pretrained(folder, backend='reference')"
        raise NotImplementedError(f"{name}: ONNX has no such operator; export a model of backend='reference', {built}")


def _planned(schema: Any, where: Callable[[str, Tensor], bool]) -> plan.Planned | None:
    """Return what repeats calls of an op that ends in the name of a backend; None for others, or without plans."""
    arguments = schema.arguments
    if arguments[-1].name != "backend" or not plan.available():
        return None
    places = [i for i, a in enumerate(arguments) if "Tensor" in str(a.type)]
    return plan.Planned(places, len(arguments), len(schema.returns), where)


def _materialized(argument: Any) -> Any:
    """Return an argument as its memory holds it: launchers pass addresses, and a conjugate's imaginary part is lazy."""
    return argument.resolve_neg() if isinstance(argument, Tensor) and argument.is_neg() else argument


def _without_base(t: Tensor) -> Tensor:
    """Detach ``t`` if it is a view: autograd forbids in-place changes of a view that an op returns."""
    return t if t._base is None else t.detach()


# Set by autograd.grad(is_grads_batched=True), which is no functorch transform. PyTorch's stubs lack its type.
_VMAP: Any = torch._C._parse_dispatch_key("VmapMode")
_TENSORS = (Tensor, torch.nn.Parameter)
_profiler_is_on: Any = torch.autograd._profiler_enabled  # pyright: ignore[reportPrivateImportUsage]
_TENSORS_OR_NONE = frozenset((*_TENSORS, type(None)))
_PLAIN = frozenset((*_TENSORS, type(None), bool, int, float, str, torch.dtype))


def nothing_intercepts(args: tuple) -> bool:
    """Return whether the dispatcher would only call the body: on tiny tensors it takes half of the time.

    Autocast is the body's own business.
    """
    if torch.compiler.is_compiling() or _profiler_is_on() or _a_mode_is_active():
        return False
    if not _PLAIN.issuperset(map(type, args)):  # a subclass, a symbol
        return False
    return not (torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args))


def is_plain(*tensors: Tensor) -> bool:
    """Return whether nothing but autograd's backward wants to see a call on ``tensors``: no mode, no subclass."""
    forward_ad: Any = torch.autograd.forward_ad
    seen = forward_ad._current_level >= 0 or autocast_is_on() or _a_mode_is_active()
    return not seen and all(type(t) in _TENSORS for t in tensors)


def is_plain_tensor(t: Tensor) -> bool:
    """Return whether a tensor is no subclass, of which one that compilers trace has no address."""
    return type(t) in _TENSORS


def is_wrapper(t: Tensor) -> bool:
    """Return whether a tensor is a subclass around others, such as a DTensor or a quantised weight; traceable."""
    return hasattr(type(t), "__tensor_flatten__")  # of a tensor itself, Dynamo says False


def is_traced() -> bool:
    """Return whether torch.compile traces this call, of a forward or of a backward."""
    # In the trace of a backward, PyTorch 2.11 and 2.12 say only the second.
    return torch.compiler.is_compiling() or TracingContext.try_get() is not None


# By names of this module: looking each up in torch._C takes as long as to call it.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms_are_active = torch._C._are_functorch_transforms_active
_key_is_included = torch._C._dispatch_tls_is_dispatch_key_included
autocast_is_on = torch._C._is_any_autocast_enabled  # for any device
_tracing_state = torch._C._get_tracing_state


def _a_mode_is_active() -> bool:
    return _dispatch_modes() > 0 or _transforms_are_active() or _key_is_included(_VMAP) or _tracing_state() is not None


def is_recorded() -> bool:
    """Return whether ``torch.jit.trace`` records what is called: ops, for it knows no autograd.Function again."""
    return _tracing_state() is not None


_FORWARD_AD: Any = torch.autograd.forward_ad


def is_short(tensors: Sequence) -> bool:
    """Return whether nothing but autograd's backward wants to see a call on ``tensors``.

    Autocast casts the arguments of a public function, and nothing after it: plans run without it (recording.py).
    """
    for t in tensors:
        if type(t) not in _TENSORS_OR_NONE:
            return False
    return not (  # in the microseconds of a small call, another function's call would be felt
        _dispatch_modes()
        or _transforms_are_active()
        or _tracing_state() is not None
        or _key_is_included(_VMAP)
        or _profiler_is_on()
        or _FORWARD_AD._current_level >= 0
        or plan.is_off()
    )


def functorch_is_active() -> bool:
    """Return whether a functorch transform is active outside torch.compile, which traces transforms itself."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def is_mapped() -> bool:
    """Return whether ``torch.func.vmap`` is active, outside torch.compile."""
    return functorch_is_active() and any(level.key().name == "Vmap" for level in get_interpreter_stack() or ())


def with_contiguous(body: Callable, *written: Tensor) -> Any:
    """Call ``body`` with contiguous copies of the small tensors it writes; copy back those that were not contiguous."""
    if all(map(Tensor.is_contiguous, written)):
        return body(*written)
    copies = [t.contiguous() for t in written]
    result = body(*copies)
    for t, copy in zip(written, copies, strict=True):
        if t is not copy:
            t.copy_(copy)
    return result


def empty_out(w: Tensor) -> Tensor:
    """Allocate an output of w's shape in which merging heads for the output projection is a view."""
    if w.dim() == 3:
        return w.new_empty(w.shape)
    if w.dim() != 4:
        raise ValueError(f"w must be (batch, nheads, seqlen, head_dim) or packed, got {tuple(w.shape)}")
    _, nheads, seqlen, head_dim = w.shape
    return w.new_empty_strided(w.shape, (seqlen * nheads * head_dim, head_dim, nheads * head_dim, 1))


def merged_layout(out: Tensor) -> Tensor:
    """Return ``out`` in a layout in which merging its heads is a view; ``out`` itself if it has that layout."""
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def autocast_dtype(t: Tensor) -> torch.dtype | None:
    """Return autocast's dtype if autocast is on for a tensor's device, else None. Meta tensors have no autocast."""
    if not autocast_is_on():  # takes a quarter of the time of the query for one device
        return None
    kind = "cpu" if t.is_cpu else "cuda" if t.is_cuda else t.device.type  # a device's type is a new string each time
    if kind not in ("cpu", "cuda") and not torch.amp.is_autocast_available(kind):
        return None
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def without_autocast(t: Tensor) -> AbstractContextManager:
    """Switch autocast off for a tensor's device, where it is on."""
    on = autocast_dtype(t) is not None
    return torch.autocast(t.device.type, enabled=False) if on else nullcontext()


def stat_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of statistics of tensors of ``dtype``: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def draw_seed(device: torch.device) -> Tensor:
    """Draw the dropout seed of one call from torch's generator: an int64 scalar on ``device``."""
    return torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device=device)
