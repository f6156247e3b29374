"""Which backend computes where none is named: the choice itself, and calls that go through it."""

from types import SimpleNamespace

import pytest
import torch

from crate_kernels import mssa, testing
from crate_kernels._core import backends, plan
from crate_kernels._triton import launch
from crate_kernels.ops.mssa import order
from crate_kernels.ops.mssa.call import DecodeCall, MSSACall
from tests.ops.common import over_tolerance, randn
from tests.tools.emulator import emulated

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
HALF, SINGLE = torch.bfloat16, torch.float32
GENERAL = ("triton", "cpp", "composite")


@pytest.fixture
def gpu(monkeypatch):
    """Return a function that pretends that GPUs are of an architecture."""
    return lambda arch: monkeypatch.setattr(launch, "arch", lambda device: arch)


def tokens(*shape, dtype=HALF, device=CUDA):
    """Return what a choice reads of a tensor."""
    return SimpleNamespace(shape=shape, dtype=dtype, device=device, is_contiguous=lambda: True)


def of_backward(w, call=None, dout="dout", names=GENERAL):
    found = order.backward(names, dout, None, w, None, None, call or MSSACall())
    assert sorted(found) == sorted(names), "the others are tried after the first"
    return found[0]


def of_decode(w, names=GENERAL):
    return order.decode(names, w, None, None, DecodeCall(None, 64, True, 0.1, False))[0]


WIDE, NARROW = (2, 3, 64, 128), (2, 3, 1, 64)
# architecture: first backend of the backward at head_dim 128, of a step at head_dim 64
ARCHS = {
    "sm_80": ("cpp", "triton"),
    "sm_89": ("triton", "triton"),
    "sm_90": ("triton", "triton"),
    "sm_100": ("triton", "triton"),
    "gfx942": ("triton", "triton"),
}


@pytest.mark.parametrize(("arch", "backward", "step"), [(a, *x) for a, x in ARCHS.items()], ids=ARCHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_the_cuda_kernels_come_first_where_triton_multiplies_twice(arch, backward, step, dtype, gpu):
    gpu(arch)
    assert of_backward(tokens(*WIDE, dtype=dtype)) == backward
    assert of_decode(tokens(*NARROW, dtype=dtype)) == step


def test_only_what_can_run_is_chosen(gpu):
    call, w = of_backward, tokens(*WIDE)
    gpu("sm_80")
    assert call(w, names=("triton", "composite")) == "triton", "without NVRTC"
    assert call(w, names=("cpp", "composite")) == "cpp", "without Triton"
    assert call(w, names=("composite",)) == "composite"


# name: (tensor, keyword arguments)
OTHER_BACKWARDS = {
    "narrow": (tokens(2, 3, 64, 112), {}),
    "wider": (tokens(2, 3, 64, 129), {}),
    "fp32": (tokens(*WIDE, dtype=SINGLE), {}),
    "threshold": (tokens(*WIDE), {"call": MSSACall(threshold=0.1)}),
    "lse-alone": (tokens(*WIDE), {"dout": None}),
}
SAME_BACKWARDS = {
    "minimum": (tokens(2, 3, 64, 113), {}),
    "causal": (tokens(*WIDE), {"call": MSSACall(causal=True)}),
    "dropout": (tokens(*WIDE), {"call": MSSACall(seed=torch.tensor(1), dropout_p=0.1)}),
    "packed": (tokens(64, 3, 128), {"call": MSSACall(cu_seqlens=torch.tensor([0, 64]), max_seqlen=64)}),
}


@pytest.mark.parametrize(("w", "options"), OTHER_BACKWARDS.values(), ids=OTHER_BACKWARDS)
def test_other_backwards_keep_the_general_order(w, options, gpu):
    gpu("sm_80")
    assert of_backward(w, **options) == "triton"


@pytest.mark.parametrize(("w", "options"), SAME_BACKWARDS.values(), ids=SAME_BACKWARDS)
def test_every_form_of_the_wide_backward_takes_the_cuda_kernels(w, options, gpu):
    gpu("sm_80")
    assert of_backward(w, **options) == "cpp"


@pytest.fixture
def mixed(backend, plain_backend, gpu, monkeypatch):
    """Let plain PyTorch stand for Triton and the emulated kernels be cpp, on CPU tensors that are an sm_80's.

    Return the list of (backend, function) that ran.
    """
    gpu("sm_80")
    floats = backends._BACKENDS["cpp"].dtypes
    for name, package in (("plain", "tests.ops.{op}.plain"), ("cpp", "crate_kernels.ops.{op}.native")):
        monkeypatch.setitem(backends._BACKENDS, name, backends.Backend(name, package, ("cpu",), floats))
    monkeypatch.setattr(backends, "_PREFERENCE", {"cpu": ("plain", "cpp")})
    modules, ran = {"cpp": emulated.on_cuda("mssa"), "plain": backends.kernel("mssa", "plain")}, []

    class Recorder:
        def __init__(self, name):
            self.name = name

        def __getattr__(self, function):
            ran.append((self.name, function))
            return getattr(modules[self.name], function)

    for name in modules:
        monkeypatch.setitem(backends._kernels, ("mssa", name), Recorder(name))
    return ran


CASES = {"full": {}, "causal": {"causal": True}, "padded": {"padding": "right"}, "dropout": {"dropout_p": 0.3}}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_a_backward_of_another_backend_than_its_forward_is_within_tolerance(options, mixed):
    case = testing.Case.of("mssa", "mixed", 2, 1, 40, 128, return_lse=True, **options)
    assert over_tolerance(case, HALF, None, "cpu") == []
    assert {("plain", "forward"), ("cpp", "backward")} <= set(mixed)
    assert not {("plain", "backward"), ("cpp", "forward")} & set(mixed)


def gradient(function, w):
    w = w.detach().requires_grad_()
    function(w).sum().backward()
    return w.grad


@pytest.mark.parametrize("mode", ["compiled", "autocast", "deterministic"])
def test_the_choice_is_made_as_the_call_runs(mode, mixed, monkeypatch):
    monkeypatch.setattr(plan, "is_off", lambda: True)  # a call that is repeated chooses nothing
    w = randn(1, 1, 20, 128, dtype=HALF)
    expected = gradient(mssa, w)
    assert mixed == [("plain", "forward"), ("cpp", "backward")]
    mixed.clear()
    if mode == "compiled":
        torch._dynamo.reset()
        found = gradient(torch.compile(mssa, backend="aot_eager", fullgraph=True), w)
    elif mode == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            found = gradient(mssa, w.float()).to(HALF)
    else:
        torch.use_deterministic_algorithms(True)
        try:
            found = gradient(mssa, w)
        finally:
            torch.use_deterministic_algorithms(False)
    assert mixed == [("plain", "forward"), ("cpp", "backward")]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["plain", "cpp"])
def test_a_named_backend_computes_both_passes(name, mixed):
    gradient(lambda w: mssa(w, backend=name), randn(1, 1, 20, 128, dtype=HALF))
    assert mixed == [(name, "forward"), (name, "backward")]


def test_what_the_first_refuses_the_next_in_general_computes(mixed, monkeypatch):
    def refuse(*args):
        raise backends.Refused("takes nothing")

    w = randn(1, 1, 20, 128, dtype=HALF)
    expected = gradient(lambda w: mssa(w, backend="plain"), w)
    monkeypatch.setitem(backends._kernels, ("mssa", "cpp"), SimpleNamespace(backward=refuse))
    mixed.clear()
    torch.testing.assert_close(gradient(mssa, w), expected, rtol=0, atol=0)
    assert mixed == [("plain", "forward"), ("plain", "backward")]


def test_turing_takes_the_cuda_kernels(gpu):
    gpu("sm_75")
    names = ("cpp", "composite")  # Triton takes no GPU before sm_80
    assert (of_backward(tokens(*WIDE), names=names), of_decode(tokens(*NARROW), names=names)) == ("cpp", "cpp")
