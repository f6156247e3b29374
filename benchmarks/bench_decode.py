"""Decoding one token on a cache, and generation of texts."""

import pytest

from benchmarks.common import What, grid
from crate_kernels.bench import decoding

PROVIDERS = list(dict.fromkeys(name for step in decoding.STEPS for name in decoding.providers_of(step.op)))
STEPS = [What(f"{s.op}-{s}", s, s.devices, s.brief) for s in decoding.STEPS]
TEXTS = {
    dtype: [What(str(t), t, (t.device,), False) for t in decoding.TEXTS if t.dtype == dtype]
    for dtype in ("fp32", "bf16")
}


@grid(STEPS, ["forward"], PROVIDERS)
def test_decode(timed, what, dtype, direction, provider):
    step = what.subject
    if provider not in decoding.providers_of(step.op):
        pytest.skip(f"{provider} has no {step.op}")
    timed(decoding.blank(step, dtype, provider), lambda row, device, timer: decoding.measure(row, step, device, timer))


def _generation(timed, what, provider):
    text = what.subject
    timed(
        decoding.blank_text(text, provider), lambda row, device, timer: decoding.measure_text(row, text, device, timer)
    )


@grid(TEXTS["fp32"], ["forward"], decoding.TEXT_PROVIDERS, ["fp32"])
def test_generation_on_a_cpu(timed, what, dtype, direction, provider):
    _generation(timed, what, provider)


@grid(TEXTS["bf16"], ["forward"], decoding.TEXT_PROVIDERS, ["bf16"])
def test_generation_on_a_gpu(timed, what, dtype, direction, provider):
    _generation(timed, what, provider)
