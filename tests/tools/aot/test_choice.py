"""The order in which backends are tried follows the recorded figures: if those change, so must the order."""

import math
import re
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="compares its kernels' figures: pip install triton")

from crate_kernels._triton import launch  # only where the launch tables can be read
from crate_kernels.ops.mssa import order
from crate_kernels.ops.mssa.call import Call, DecodeCall
from tests.tools.aot import choice, figures

NAMES = ("triton", "cpp", "composite")
TARGETS = ("sm_80", "sm_90")
CASES = [pytest.param(name, target, id=f"{name}-{target}") for target in TARGETS for name in choice.COMPARED]


def first(name, target, monkeypatch):
    """Return the backend that is tried first for a family's call, made of stand-ins for tensors."""
    monkeypatch.setattr(launch, "arch", lambda device: target)
    form, head_dim = re.match(r"(.*)-d(\d+)", name).groups()
    new = 1 if form == "mssa_decode" else 256
    w = SimpleNamespace(
        shape=(1, 12, new, int(head_dim)),
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
        is_contiguous=lambda: True,
    )
    if form == "mssa_backward":
        return order.backward(NAMES, w, None, w, w, None, Call())[0]
    if form == "mssa_decode":
        return order.decode(NAMES, w, w, None, DecodeCall(None, 4096, True, 0.125, False))[0]
    return NAMES[0]  # no other call has an order of its own


@pytest.mark.parametrize(("name", "target"), CASES)
def test_the_first_backend_is_the_one_of_the_lower_bound(name, target, monkeypatch):
    found = {compiler: round(cost, 2) for compiler, cost in choice.costs(name, target).items()}
    expected = "cpp" if choice.cuda_wins(name, target) else "triton"
    assert first(name, target, monkeypatch) == expected, f"clocks over those of the work: {found}"


def test_where_the_cuda_kernels_have_no_bound_triton_comes_first(monkeypatch):
    assert set(figures.read()["cuda"]) == set(TARGETS)
    assert {first(name, "sm_100", monkeypatch) for name in choice.COMPARED} == {"triton"}


def test_figures_that_change_are_seen(monkeypatch):
    """Half of the shared memory's clocks, and Triton's backward is as good as the other."""
    every = figures.read()
    for compiler in ("3.6", "3.7"):
        figure = every[compiler]["sm_80"]["mssa_backward-d128-n16384"]
        figure["shared"] /= 2
        figure["tensor"] /= 2
    monkeypatch.setattr(figures, "read", lambda: every)
    assert not choice.cuda_wins("mssa_backward-d128-n16384", "sm_80")
    assert choice.cuda_wins("mssa_backward-d128-n197", "sm_80")


def figure(kernel="", streams=False, **pipes):
    return {**dict.fromkeys(("issue", "tensor", "mufu", "alu", "fp32", "shared"), 0), **pipes, "kernel": kernel} | {
        "streams": streams
    }


# name: (a figure, its family's name or "" for CUDA's, clocks of the work on sm_90)
WORK = {
    "bytes": (figure(memory=825), "mssa_decode-d64", 825),
    "triton-forward": (figure(), "mssa_forward-d128-n16384", 64 * 128 * 128 * 2 / 2048),
    "triton-backward": (figure(), "mssa_backward-d64-n197", 64 * 32 * 64 * 5 / 2048),
    "cuda-forward": (figure("mssa::mma_forward_kernel<bf16, 64, 2, 64, true>"), "", 128 * 64 * 64 * 2 / 2048),
    "cuda-backward": (figure("mssa::mma_backward_kernel<bf16, 128, 1, 32, true>"), "", 64 * 16 * 128 * 5 / 2048),
    "causal-dw": (
        figure("tssa_causal_bwd_kernel<TssaFours, (TssaCausalBackwardStep)3>"),
        "",
        3 * 4 * 1024 * 2 * 132 * 1.83e9 / 4800e9,
    ),
}


@pytest.mark.parametrize(("one", "family", "clocks"), WORK.values(), ids=WORK)
def test_the_work_of_a_trip(one, family, clocks):
    found = choice._work_of_triton(family, one, "sm_90") if family else choice._work_of_cuda(one, "sm_90")
    assert math.isclose(found, clocks)


def test_the_memory_is_the_least_where_it_is_the_limit():
    assert choice.cost(figure(issue=50, shared=30, streams=True), 100) == 1.0
    assert choice.cost(figure(issue=50, shared=130, streams=True), 100) == 1.3
    assert choice.cost(figure(issue=50, tensor=90), 100) == 0.9
