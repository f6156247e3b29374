"""Records what the body of an op does, and writes it down as a plan, which csrc/common/plan_program.h reads."""

from __future__ import annotations

import itertools
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from crate_kernels._core.launches import Launch, Unplannable

_ALIGNMENT = 512  # bytes, of what shares one allocation; as PyTorch's allocator has it


class _Local(threading.local):
    recorder: Recorder | None = None  # in the class: an attribute that a thread lacks is slow to look up


this_thread = _Local()
_alive: dict[int, Any] = {}  # what owns the functions that plans launch


class _Place(NamedTuple):
    """Where a tensor is: ("input", i), ("allocation", i) or ("result", step), and bytes from its first element."""

    root: tuple[str, int]
    offset: int


class _PlanStep(NamedTuple):
    """A launch, or an operation on tensors."""

    kind: str
    tensors: tuple[Tensor, ...]  # those that need a register each; the first may be written
    launch: Launch | None = None
    numbers: tuple[Any, ...] = ()


_ALLOCATIONS = frozenset(
    f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)
_ZEROS = frozenset(f"aten::{name}" for name in ("zeros", "zeros_like", "new_zeros"))
_COPIES = frozenset(f"aten::{name}" for name in ("_to_copy", "clone"))
_OURS = "crate_kernels_C::"
# As csrc/common/plan_program.h counts them.
_OPERATIONS = {name: n for n, name in enumerate(("kernel", "addmm", "mm", "copy", "zero", "sum", "add", "mul", "view"))}
_TENSOR, _SOME_TENSOR, _NONE, _VALUE, _SOME_VALUE = range(5)
_DTYPES = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.bool: 11,
    torch.bfloat16: 15,
}


class Recorder(TorchDispatchMode):
    """Notes what a body does to ``inputs``, for this thread."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.inputs = inputs
        self.steps: list[_PlanStep] = []
        self.allocations: list[Tensor] = []
        self.results: dict[int, Tensor] = {}  # what steps make, by their number
        self.failure: str | None = None
        self._places: dict[int, _Place] = {}
        self._alive: list[Tensor] = []  # an id is a tensor's for as long as it lives
        for number, tensor in enumerate(inputs):
            self._put(tensor, ("input", number), 0)

    def __enter__(self) -> Recorder:
        this_thread.recorder = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        this_thread.recorder = None
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.failure is None:
            try:
                self._note(func, args, kwargs or {}, result)
            except (Unplannable, RuntimeError) as reason:  # PyTorch's own, of a tensor without memory
                self.failure = str(reason)
        return result

    def _put(self, tensor: Tensor, root: tuple[str, int], offset: int) -> None:
        self._places[id(tensor)] = _Place(root, offset)
        self._alive.append(tensor)

    def place(self, tensor: Tensor) -> _Place:
        """Return where a tensor is."""
        found = self._places.get(id(tensor))
        if found is None:
            if tensor.numel():
                raise Unplannable(f"a tensor {tuple(tensor.shape)} that is no input of the call")
            self._allocate(tensor)
            found = self._places[id(tensor)]
        return found

    def base(self, root: tuple[str, int]) -> Tensor:
        """Return the whole tensor at a root."""
        kind, number = root
        if kind == "result":
            return self.results[number]
        return self.inputs[number] if kind == "input" else self.allocations[number]

    def _allocate(self, tensor: Tensor) -> None:
        if tensor.dtype not in _DTYPES or tensor.layout != torch.strided:
            raise Unplannable(f"a new tensor of {tensor.dtype}")
        self.allocations.append(tensor)
        self._put(tensor, ("allocation", len(self.allocations) - 1), 0)

    def _note(self, func: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        schema = func._schema
        name, overload = schema.name, schema.overload_name
        if name in _ALLOCATIONS:
            self._allocate(result)
        elif name in _ZEROS:
            self._allocate(result)
            self._step("zero", result)
        elif name == "aten::zero_":
            self._step("zero", args[0])
        elif func.is_view or name == "aten::_unsafe_view":
            self._view(args[0], result)
        elif name in _COPIES:
            self._allocate(result)
            self._step("copy", result, args[0])
        elif name == "aten::copy_":
            self._step("copy", *args[:2])
        elif name == "aten::mm":
            self._allocate_unless_out(overload, result)
            self._step("mm", result, *args)
        elif name == "aten::addmm":
            self._allocate_unless_out(overload, result)
            self._step("addmm", result, *args, numbers=(kwargs.get("beta", 1), kwargs.get("alpha", 1)))
        elif name == "aten::addmm_":
            self._step("addmm", result, *args, numbers=(kwargs.get("beta", 1), kwargs.get("alpha", 1)))
        elif name in ("aten::add", "aten::sub") and overload == "Tensor" and _are_tensors(args):
            sign = 1 if name == "aten::add" else -1
            self._step("add", *args, numbers=(sign * kwargs.get("alpha", 1),))
            self._add_result(result)
        elif name in ("aten::add_", "aten::sub_") and overload == "Tensor" and _are_tensors(args) and _are_alike(args):
            sign = 1 if name == "aten::add_" else -1
            self._step("add", *args, numbers=(sign * kwargs.get("alpha", 1),))
            self._replaced(result)
        elif name in ("aten::mul", "aten::mul_") and isinstance(args[1], (int, float)):
            self._step("mul", args[0], numbers=(args[1],))
            self._replaced(result) if name == "aten::mul_" else self._add_result(result)
        elif name == "aten::cat":
            self._cat(result, *args)
        elif (name, overload) == ("aten::sum", "dim_IntList") and len(args) == 2 and not kwargs and _is_wide(args[0]):
            self._step("sum", args[0], numbers=tuple(args[1]))
            self._add_result(result)
        elif name.startswith(_OURS) and not kwargs and result is None:
            self._kernel(schema, args)
        elif name == "aten::promote_types":
            return
        else:
            raise Unplannable(f"{name}.{overload}")

    def _add_result(self, result: Tensor) -> None:
        """Note that the last step makes a new tensor."""
        number = len(self.steps) - 1
        self.results[number] = result
        self._put(result, ("result", number), 0)

    def _replaced(self, result: Tensor) -> None:
        """Note that a tensor is changed in place to what the last step makes."""
        made = torch.empty_like(result)
        self._add_result(made)
        self._step("copy", result, made)

    def _allocate_unless_out(self, overload: str, result: Tensor) -> None:
        if overload != "out":
            self._allocate(result)

    def _step(self, kind: str, *tensors: Tensor, numbers: tuple = ()) -> None:
        for tensor in tensors:
            self.place(tensor)
        self.steps.append(_PlanStep(kind, tensors, numbers=numbers))

    def _view(self, base: Tensor, result: Any) -> None:
        root, offset = self.place(base)
        for view in result if isinstance(result, (tuple, list)) else (result,):
            if view.untyped_storage().data_ptr() != base.untyped_storage().data_ptr():  # contiguous() may copy
                if view.shape != base.shape:
                    raise Unplannable("a copy in another shape")
                self._allocate(view)
                self._step("copy", view, base)
                continue
            moved = (view.storage_offset() - base.storage_offset()) * base.element_size()
            self._put(view, root, offset + moved)

    def _cat(self, result: Tensor, parts: Sequence[Tensor], dim: int = 0) -> None:
        self._allocate(result)
        first = 0
        for part in parts:
            into = result.narrow(dim, first, part.shape[dim])
            self._view(result, into)
            self._step("copy", into, part)
            first += part.shape[dim]

    def _kernel(self, schema: Any, args: tuple) -> None:
        """Note the call of a kernel of ours, which returns nothing."""
        tensors, arguments = [], []
        for expected, value in zip(schema.arguments, args, strict=True):
            optional = str(expected.type).startswith("Optional")
            if value is None:
                arguments.append((_NONE, 0))
            elif isinstance(value, Tensor):
                arguments.append((_SOME_TENSOR if optional else _TENSOR, len(tensors)))
                tensors.append(value)
            elif isinstance(value, (bool, int, float)):
                real = "float" in str(expected.type)
                arguments.append((_SOME_VALUE if optional else _VALUE, _bits(value) if real else int(value)))
            else:
                raise Unplannable(f"{schema.name} of a {type(value).__name__}")
        self._step("kernel", *tensors, numbers=(schema.name.removeprefix(_OURS), arguments))

    def launched(self, describe: Callable[[], Launch]) -> None:
        """Note a launch; ``describe`` may raise Unplannable."""
        if self.failure is not None:
            return
        try:
            launch = describe()
            for each in launch.structs():
                for tensor in each.tensors.values():
                    self.place(tensor)
        except Unplannable as reason:
            self.failure = str(reason)
            return
        self.steps.append(_PlanStep("launch", (), launch))

    def words(self, results: Sequence[Tensor]) -> list[int]:
        """Write the plan down, as csrc/common/plan_program.h reads it."""
        if self.failure is not None:
            raise Unplannable(self.failure)
        return _Writer(self).write(results)


def _are_tensors(args: tuple) -> bool:
    """Return whether the arguments are floating tensors: numbers are PyTorch's business."""
    return all(isinstance(a, Tensor) and a.is_floating_point() for a in args)


def _are_alike(args: tuple) -> bool:
    """Return whether tensors have one dtype: what is changed in place is not promoted."""
    return len({a.dtype for a in args}) == 1


def _is_wide(t: Tensor) -> bool:
    """Return whether a sum of a tensor has its dtype under autocast too, which sums 16 bits in float32 on GPUs."""
    return t.dtype in (torch.float32, torch.float64)


def recorder() -> Recorder | None:
    """Return what records this thread's call, if anything does."""
    return this_thread.recorder


def unseen() -> Any:
    """Hide what runs inside this context from the recorder, as an allocation that a launcher makes for itself."""
    return _disable_current_modes()


class _Writer:
    """Gives every tensor of a recorded call a register, and writes allocations, steps and results."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.registers: dict[tuple[str, int], int] = {("input", i): i for i in range(len(recorder.inputs))}
        self.views: dict[tuple, int] = {}
        self.steps: list[list[int]] = []
        self.scratch: dict[tuple[str, int], int] = {}

    def write(self, results: Sequence[Tensor]) -> list[int]:
        """Return the numbers of a plan."""
        recorder, places = self.recorder, self.recorder.place
        own = {places(t).root for step in recorder.steps for t in step.tensors} | {places(t).root for t in results}
        if any(places(t).root[0] == "input" for t in results):
            raise Unplannable("a result is an input")
        words, count, scratch_bytes = [], 0, 0
        for number, tensor in enumerate(recorder.allocations):
            root = ("allocation", number)
            if root in own:
                self.registers[root] = len(recorder.inputs) + count
                words += [_DTYPES[tensor.dtype], *_listed(tensor.shape), *_listed(tensor.stride())]
                count += 1
            else:  # only launches touch it
                self.scratch[root] = scratch_bytes
                scratch_bytes += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        if self.scratch:
            scratch_bytes = max(scratch_bytes, _ALIGNMENT)  # a parameter is an address even of nothing
        self.scratch_register = len(recorder.inputs) + count
        self.next = self.scratch_register + (scratch_bytes > 0)
        for number, step in enumerate(recorder.steps):
            self.steps.append(self._launch(step.launch) if step.launch is not None else self._operation(step))
            if number in recorder.results:
                self.registers["result", number] = self._next_register()
        last = [self._register(t) for t in results]
        steps = itertools.chain.from_iterable(self.steps)
        return [count, *words, scratch_bytes, len(self.steps), *steps, *_listed(last)]

    def _next_register(self) -> int:
        """Return the register of what the last step makes."""
        self.next += 1
        return self.next - 1

    def _register(self, tensor: Tensor) -> int:
        """Return the register that holds a tensor of exactly these sizes and strides; where there is none, view one."""
        root, offset = self.recorder.place(tensor)
        base = self.recorder.base(root)
        if base.dtype != tensor.dtype or offset % base.element_size():
            raise Unplannable("a view in another dtype")
        if (base.shape, base.stride()) == (tensor.shape, tensor.stride()) and not offset:
            return self.registers[root]
        key = (root, offset, tuple(tensor.shape), tensor.stride())
        if key not in self.views:
            layout = [*_listed(tensor.shape), *_listed(tensor.stride()), offset // base.element_size()]
            self.steps.append([0, _OPERATIONS["view"], self.registers[root], *layout])
            self.views[key] = self._next_register()
        return self.views[key]

    def _address(self, tensor: Tensor) -> tuple[int, int]:
        """Return a register, and the bytes from its tensor's first element, of a parameter."""
        root, offset = self.recorder.place(tensor)
        if root in self.scratch:
            return self.scratch_register, self.scratch[root] + offset
        return self.registers[root], offset

    def _launch(self, launch: Launch) -> list[int]:
        places, sizes, content, addresses = [], [], b"", []
        for value, tensors in launch.structs():
            places.append(len(content))
            for at, tensor in tensors.items():
                register, offset = self._address(tensor)
                addresses += [register, len(content) + at, offset]
            sizes.append(len(value))
            content += value + bytes(-len(value) % 8)
        numbers = struct.unpack(f"<{len(content) // 8}q", content)
        flags = [int(launch.cooperative), int(launch.serialized)]
        fixed = [1, launch.function, *launch.grid, launch.threads, launch.shared_bytes, launch.ctas, *flags]
        _alive[launch.function] = launch.owner
        return [
            *fixed,
            *_listed(places),
            *_listed(numbers),
            *_listed(sizes),
            len(addresses) // 3,
            *addresses,
        ]

    def _operation(self, step: _PlanStep) -> list[int]:
        words, registers = [0, _OPERATIONS[step.kind]], [self._register(t) for t in step.tensors]
        if step.kind == "kernel":
            name, arguments = step.numbers
            words += [*_listed(name.encode()), len(arguments)]
            for kind, value in arguments:
                words += [kind, registers[value] if kind in (_TENSOR, _SOME_TENSOR) else value]
            return words
        if step.kind == "sum":
            return [*words, *registers, *_listed(step.numbers)]
        return [*words, *registers, *map(_bits, step.numbers)]


def _listed(values: Sequence[int]) -> list[int]:
    return [len(values), *values]


def _bits(value: float) -> int:
    """Return the bits of a number as those of a whole one."""
    return struct.unpack("<q", struct.pack("<d", value))[0]
