"""Parameters of the benchmarks: what is timed, in which dtype and direction, by whom."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest

from crate_kernels import testing
from crate_kernels._core.spec import Provider
from crate_kernels.bench import measuring, providers

DTYPES = ("fp32", "bf16")
_LONG = 1024  # tokens
_ONLY_FULL = ("backward", "flex")


@dataclass(frozen=True)
class What:
    """One thing that several providers compute, and where and when it is timed.

    Attributes:
        name: of the test.
        subject: the case.
        devices: device types on which it is timed.
        brief: whether the default run times it.
        only_full: directions and providers that the default run leaves to the full one.
    """

    name: str
    subject: Any
    devices: tuple[str, ...]
    brief: bool
    only_full: tuple[str, ...] = ()

    def runs_on(self, device_type: str) -> bool:
        """Whether it is timed on such a device."""
        return device_type in self.devices


def grid(subjects: Iterable[What], directions: Iterable[str], names: Iterable[str], dtypes: Iterable[str] = DTYPES):
    """Parametrise by what, dtype, direction and provider, the providers of one thing beside each other."""
    names = tuple(names)
    return pytest.mark.parametrize(
        ("what", "dtype", "direction", "provider"),
        [
            pytest.param(what, dtype, direction, name, id=f"{what.name}-{dtype}-{direction}-{name}")
            for what in subjects
            for dtype in dtypes
            for direction in directions
            for name in names
        ],
    )


def operator_grid(*ops: str):
    """Parametrise by the timed cases of operators.

    Where sequences are long, a backward pass alone takes eager seconds, and FlexAttention is compiled for seconds.
    """
    cases = [
        What(f"{t.case.op}-{t}-{t.devices[0]}", t, t.devices, t.brief, _ONLY_FULL if t.seqlen >= _LONG else ())
        for t in testing.TIMED_CASES
        if t.case.op in ops
    ]
    return grid(cases, measuring.DIRECTIONS, [p.name for p in providers.of(ops[0])])


def provider(op: str, name: str) -> Provider:
    """Return a provider of an operator by its name."""
    return next(p for p in providers.of(op) if p.name == name)


def operator(timed, bench: str, what: What, dtype: str, direction: str, name: str, sweep: str = "") -> None:
    """Time one provider of one operator."""
    case = what.subject
    chosen = provider(case.case.op, name)
    row = measuring.blank(bench, case, dtype, direction, name, sweep)
    timed(row, lambda row, device, timer: measuring.measure(row, case, chosen, device, timer))
