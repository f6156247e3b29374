"""Parameters of kernels: the device code's structs, tensors in the place of addresses, and typed numbers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from crate_kernels._core.launches import Struct
from crate_kernels._core.op_checks import KERNEL_DTYPES

POINTER = ctypes.c_void_p
DTYPES = KERNEL_DTYPES  # the device code's numbers of them
CPP_TYPES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "fp16"}  # and its types


def fields(kind: Any, names: str) -> tuple[tuple[str, Any], ...]:
    """Return fields of one type, by their names with a space between."""
    return tuple((name, kind) for name in names.split())


class Record(ctypes.Structure):
    """A struct of the device code, with the same names of fields. Values are passed by keyword, the others are 0.

    A field that is a pointer, ``POINTER``, takes a tensor, or None for a null pointer. A record within a record is
    passed whole. ``cpp`` is the struct's name in C++ below the namespace crate_kernels; by default that of the class.
    """

    cpp = ""

    def __init__(self, **values: Any) -> None:
        super().__init__()
        object.__setattr__(self, "tensors", {})  # by the byte of their address
        for name, value in values.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        offsets = self.offsets()
        if name not in offsets:
            raise AttributeError(f"{type(self).__name__} has no field {name}; it has {', '.join(offsets)}")
        offset = offsets[name]
        if isinstance(value, Tensor):
            self.tensors[offset] = value
            value = value.data_ptr()
        elif isinstance(value, Record):
            self.tensors.update({offset + inside: tensor for inside, tensor in value.tensors.items()})
        else:
            self.tensors.pop(offset, None)
        super().__setattr__(name, value)

    @classmethod
    def cpp_name(cls) -> str:
        """Return the struct's name in C++."""
        return cls.cpp or cls.__name__

    @classmethod
    def _all_fields(cls) -> dict[str, Any]:
        return {field[0]: field[1] for base in reversed(cls.__mro__) for field in base.__dict__.get("_fields_", ())}

    @classmethod
    @cache  # every assignment of a field asks
    def offsets(cls) -> dict[str, int]:
        """Return where each field begins, those of a base first."""
        return {name: getattr(cls, name).offset for name in cls._all_fields()}

    @classmethod
    def parts(cls) -> list[type[Record]]:
        """List the records that are fields."""
        return [kind for kind in cls._all_fields().values() if isinstance(kind, type) and issubclass(kind, Record)]


# A record; an address; a number of a C type, ctypes.c_int64(5), as the kernel declares it.
Parameter: TypeAlias = "Record | Tensor | ctypes._SimpleCData[Any] | None"


def packed(parameters: Sequence[Parameter]) -> list[Struct]:
    """Return the bytes of parameters, and the tensors whose addresses are in them."""
    found = []
    for place, value in enumerate(parameters):
        if isinstance(value, Tensor):
            found.append(Struct(value.data_ptr().to_bytes(8, "little"), {0: value}))
        elif value is None:
            found.append(Struct(bytes(8), {}))
        elif isinstance(value, (Record, ctypes._SimpleCData)):
            found.append(Struct(bytes(value), dict(getattr(value, "tensors", {}))))
        else:
            raise TypeError(f"parameter {place} must be a record, a tensor, None or of ctypes, got {value!r}")
    return found


def records(parameters: Sequence[Parameter]) -> tuple[type[Record], ...]:
    """Return the types of the records among parameters."""
    return tuple(type(value) for value in parameters if isinstance(value, Record))
