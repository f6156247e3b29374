"""The NaN that fills uninitialised memory in these tests is seen, and changes nothing that was written."""

import subprocess
import sys

import pytest
import torch

from crate_kernels import testing
from crate_kernels._core import operator
from crate_kernels.ops.tssa import composite
from tests.ops.common import backends, over_tolerance

ALLOCATORS = {
    "empty": lambda t: torch.empty(t.shape, dtype=t.dtype),
    "empty-size": lambda t: torch.empty(*t.shape, dtype=t.dtype, requires_grad=True),
    "empty_like": lambda t: torch.empty_like(t),  # looked up when called, after the allocators are patched
    "empty_strided": lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype),
    "empty_permuted": lambda t: torch.empty_permuted(t.shape, (1, 0), dtype=t.dtype),
    "new_empty": lambda t: t.new_empty(t.shape),
    "new_empty_strided": lambda t: t.new_empty_strided(t.shape, t.stride()),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("allocate", ALLOCATORS.values(), ids=ALLOCATORS)
def test_uninitialised_memory_is_nan(allocate, dtype):
    assert allocate(torch.zeros(3, 4, dtype=dtype)).isnan().all()


def test_integers_and_meta_tensors_are_left_alone():
    assert torch.empty(3, dtype=torch.int64).shape == (3,)
    assert torch.empty(3, device="meta").device.type == "meta"


def test_contexts_of_a_device_hold_afterwards():
    """In a separate process: PyTorch lists the allocators for them once, and 2.15's compiler asks for the list."""
    lines = (
        "import pytest, torch",
        "from tests.tools import fresh",
        "with pytest.MonkeyPatch.context() as patch:",
        "    fresh.fill(patch)",
        "    with torch.device('cpu'): torch.empty(0)",
        "with torch.device('meta'): print(torch.empty(0).device)",
    )
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert done.stdout == "meta\n", done.stderr


def test_an_output_that_a_kernel_leaves_unwritten_is_over_tolerance(monkeypatch):
    case = next(c for c in testing.cases("tssa") if c.name == "n65")
    assert over_tolerance(case, torch.float32, "composite", "cpu") == []
    forward = composite.forward

    def all_but_the_last_row(w, *args):
        out = operator.empty_out(w)
        written, *rest = forward(w, *args)
        out[:, :, :-1] = written[:, :, :-1]
        return out, *rest

    monkeypatch.setattr(composite, "forward", all_but_the_last_row)
    assert [m.output for m in over_tolerance(case, torch.float32, "composite", "cpu") if not m.finite] == ["out"]


@pytest.mark.parametrize(
    ("op", "name"),
    [("mssa", "causal-pad-left"), ("tssa", "dropout-packed"), ("tssa", "causal-pad-row"), ("ista", "many-tokens")],
)
def test_the_poison_changes_no_result(op, name, monkeypatch):
    case = next(c for c in testing.CASES if (c.op, c.name) == (op, name))
    calls = [(testing.make_inputs(case, torch.float32, p.values[1]), p.values[0]) for p in backends(op)]
    poisoned = [testing.run(case, *call) for call in calls]
    monkeypatch.undo()
    # A constant function of the allocator again.
    assert torch.empty.__name__ == "empty"
    torch.testing.assert_close([testing.run(case, *call) for call in calls], poisoned, rtol=0, atol=0, equal_nan=True)
