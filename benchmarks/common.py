"""Parameters of the benchmarks: cases, dtypes, directions and providers."""

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
    """One subject that several providers compute, and the devices and runs that time it.

    Attributes:
        name: name in the test id.
        subject: the case.
        devices: device types on which the subject is timed.
        brief: whether the default run times the subject.
        only_full: directions and providers that only the full run times.
    """

    name: str
    subject: Any
    devices: tuple[str, ...]
    brief: bool
    only_full: tuple[str, ...] = ()

    def runs_on(self, device_type: str) -> bool:
        """Return whether the subject is timed on this type of device."""
        return device_type in self.devices


def grid(subjects: Iterable[What], directions: Iterable[str], names: Iterable[str], dtypes: Iterable[str] = DTYPES):
    """Parametrise by subject, dtype, direction and provider; the providers of one subject follow one another."""
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

    For long sequences the default run omits two slow things: the backward pass alone, seconds in eager, and
    FlexAttention, seconds to compile.
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
