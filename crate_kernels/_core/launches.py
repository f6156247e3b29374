"""A kernel's launch, as a driver takes it and a plan repeats it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor


class Unplannable(Exception):
    """The body of an op did something that no plan can repeat."""


class Struct(NamedTuple):
    """A parameter of several numbers and addresses: its bytes, and the tensors by the byte of their address."""

    content: bytes
    tensors: Mapping[int, Tensor]


class Launch(NamedTuple):
    """A kernel's launch, as a driver takes it.

    Attributes:
        function: address of the driver's function.
        grid: blocks, or clusters of blocks, by dimension.
        threads: of a block.
        shared_bytes: dynamic shared memory of a block.
        ctas: blocks of a cluster.
        cooperative, serialized: attributes of the launch.
        parameters: bytes of a number, a tensor, None for a null pointer, or a struct, in order.
        owner: keeps ``function`` alive.
    """

    function: int
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    ctas: int
    cooperative: bool
    serialized: bool
    parameters: Sequence[bytes | Tensor | Struct | None]
    owner: Any

    def structs(self) -> list[Struct]:
        """Return every parameter as a struct."""
        return [_as_struct(parameter) for parameter in self.parameters]


def _as_struct(parameter: bytes | Tensor | Struct | None) -> Struct:
    if isinstance(parameter, Struct):
        return parameter
    if isinstance(parameter, bytes):
        return Struct(parameter, {})
    return Struct(bytes(8), {} if parameter is None else {0: parameter})
