"""Launches with equal keys take the same compiled kernel: what Triton would specialise is the same."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from tests.tools.aot import harness

harness.needs_compiler()

import triton  # noqa: E402  # only where Triton compiles
import triton.language as tl  # noqa: E402
from triton import runtime  # noqa: E402
from triton.backends.nvidia.compiler import CUDABackend  # noqa: E402
from triton.runtime.jit import create_function_from_signature  # noqa: E402

from crate_kernels._triton import launch  # noqa: E402
from crate_kernels.ops.mssa.triton.tile import TokenRows  # noqa: E402
from tests.ops.ista import aot as ista  # noqa: E402
from tests.ops.mssa import aot as mssa  # noqa: E402
from tests.ops.tssa import aot as tssa  # noqa: E402

CALLS = {
    "mssa": mssa.backward(197, 64, dropout_p=0.1, padded=True),
    "mssa-packed": mssa.forward(197, 48, packed=True, causal=True),
    "mssa-decode": mssa.decode(8, 64, padded=True),
    "mssa-between": mssa.between(True, 197, 64, causal=True),
    "tssa": tssa.full(197, 12, 64, padded=True),
    "tssa-causal": tssa.causal(1000, 12, 64, dropout_p=0.1),
    "ista": ista.step(1576, 384),
}
NUMBERS = (0, 1, 2, 15, 16, 48, -16, 2**31 - 1, -(2**31), 2**31, 2**33)
WIDER = {torch.bfloat16: torch.float32}


def others(value):
    """Return what a caller might pass in place of an argument."""
    if isinstance(value, torch.Tensor):
        return [value.to(WIDER.get(value.dtype, torch.bfloat16)), value.clone(), None]
    if type(value) is int:
        return list(NUMBERS)
    return [2.0 * value, 1.0, 1] if isinstance(value, float) else []


def variants(arguments):
    """Return the arguments of a launch, and those with one of them changed, in a record too."""
    yield arguments
    for name, value in arguments.items():
        if name.isupper():
            continue
        if not isinstance(value, tuple):
            yield from ({**arguments, name: other} for other in others(value))
            continue
        for place, field in enumerate(value):
            for other in others(field):
                yield {**arguments, name: value._replace(**{value._fields[place]: other})}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_equal_keys_have_equal_specialisations(call):
    backend = CUDABackend(harness.TARGETS["sm_90"])
    for found in harness.launches(call, "sm_90"):
        kernel = found.function
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        specialisations, tried = defaultdict(set), 0
        for arguments in variants(found.arguments):
            key = launch._key(kernel, arguments | found.options)
            _, specialisation, options = bind(**arguments, **found.options)
            specialisations[key].add((str(specialisation), str(options)))
            tried += 1
        assert all(len(kinds) == 1 for kinds in specialisations.values()), kernel.__name__
        assert 1 < len(specialisations) < tried, "all keys are equal, or all are different"


class Driver:
    """A driver without a device: loads nothing, and notes what each launch gives to its launcher."""

    def __init__(self, launched):
        self.utils = SimpleNamespace(
            load_binary=lambda *args: (None, None, 32, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": harness.SHARED_LIMIT["sm_90"]},
            unload_module=lambda module: None,
        )
        self.launcher_cls = lambda source, metadata: lambda *args: launched.append(args)

    def get_current_target(self):
        return harness.TARGETS["sm_90"]

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")


@triton.jit(do_not_specialize=["count"])
def _copy_kernel(x, out_ptr, nothing_ptr, count, factor, BLOCK: tl.constexpr, FORM: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x.ptr + offsets * x.stride_s, offsets < count) * factor, offsets < count)


def test_a_kept_kernel_is_launched_as_triton_launches_it(monkeypatch):
    launched = []
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(runtime.driver, "_active", Driver(launched))
    x, out = TokenRows(torch.zeros(64), 2, 1), torch.zeros(32)
    for count in (32, 5):
        arguments = {"x": x, "out_ptr": out, "nothing_ptr": None, "count": count, "factor": 0.5}
        launched.clear()
        for _ in range(2):
            launch.run(_copy_kernel, 3, **arguments, BLOCK=16, FORM=("a", 1), num_warps=1)
        _copy_kernel[(3,)](**arguments, BLOCK=16, FORM=("a", 1), num_warps=1, enable_fp_fusion=True)
        assert len(launch._compiled) == 1
        # Grid, stream, function, its metadata, the launch's metadata, two hooks, the arguments in the kernel's order.
        assert [args[:4] for args in launched] == [(3, 1, 1, 0)] * 3
        assert all(args[9:] == (x, out, None, count, 0.5, 16, ("a", 1)) for args in launched)
        parts = [(*args[4:6], *args[7:9]) for args in launched]
        assert parts[0] == parts[1] == parts[2]
