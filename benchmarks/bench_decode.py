"""Decoding one token on a cache, and generation of texts."""

import pytest

from benchmarks.common import What, grid
from crate_kernels.benchmark import decoding

STEPS = [What(f"{s.op}-{s}", s, s.devices, s.brief) for s in decoding.STEPS]
TEXTS = [What(str(t), t, t.devices, t.brief) for t in decoding.TEXTS]


@grid(STEPS, ["forward"], decoding.PROVIDERS["mssa"])
def test_decode(timed, what, dtype, direction, provider):
    step = what.subject
    if provider not in decoding.PROVIDERS[step.op]:
        pytest.skip(f"{provider} has no {step.op}")
    timed(decoding.blank(step, dtype, provider), lambda row, device, timer: decoding.measure(row, step, device, timer))


@grid(TEXTS, ["forward"], decoding.TEXT_PROVIDERS, ["fp32", "bf16"])
def test_generation(timed, what, dtype, direction, provider):
    text = what.subject
    timed(
        decoding.blank_text(text, dtype, provider),
        lambda row, device, timer: decoding.measure_text(row, text, device, timer),
    )
