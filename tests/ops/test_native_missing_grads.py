"""A backward pass gets None for outputs without a gradient, in place of zeros as large as what the call keeps."""

import pytest
import torch

import crate_kernels
from crate_kernels.ops.ista import op as ista
from crate_kernels.ops.mssa import op as mssa
from crate_kernels.ops.tssa import op as tssa
from tests.ops.common import NEEDS_EXTENSION, randn

pytestmark = NEEDS_EXTENSION


def attend(w, which, backend):
    return crate_kernels.mssa(w, return_lse=True, backend=backend)[which]


def statistics(causal):
    def run(w, which, backend):
        temp = torch.ones(w.shape[1], 1)
        return crate_kernels.tssa(w, temp, causal=causal, return_membership=True, backend=backend)[which]

    return run


def shrink(w, which, backend):
    x, weight = w.flatten(0, 2), randn(w.shape[-1], 3 * w.shape[-1], seed=1, dtype=w.dtype)
    return crate_kernels.ista_overcomplete(x, weight, step_size=0.1, lambd=0.1, backend=backend)


# The Function, a call of one output, and which of its outputs have no gradient then.
CASES = {
    "mssa-out": (mssa.MSSAFunction, attend, 0, [False, True]),
    "mssa-lse": (mssa.MSSAFunction, attend, 1, [True, False]),
    "tssa-out": (tssa.TSSAFunction, statistics(False), 0, [False, True, True, True]),
    "tssa-membership": (tssa.TSSAFunction, statistics(False), 1, [True, False, True, True]),
    "causal-out": (tssa.CausalTSSAFunction, statistics(True), 0, [False, True, True]),
    "causal-membership": (tssa.CausalTSSAFunction, statistics(True), 1, [True, False, True]),
    "ista-overcomplete": (ista.OvercompleteISTAFunction, shrink, 0, [False, True, True]),
}


@pytest.mark.parametrize(("function", "run", "which", "missing"), CASES.values(), ids=CASES)
def test_a_missing_gradient_is_none_and_makes_no_zeros(function, run, which, missing, monkeypatch):
    missing_grads, backward = [], function.backward

    def recording(ctx, *grads):
        missing_grads.append([g is None for g in grads])
        return backward(ctx, *grads)

    monkeypatch.setattr(function, "backward", staticmethod(recording))
    w, expected = (randn(2, 3, 9, 8, dtype=torch.float32).requires_grad_() for _ in range(2))
    out, reference = run(w, which, "cpp"), run(expected, which, "reference")
    dout = randn(*out.shape, seed=2, dtype=out.dtype)
    out.backward(dout)
    reference.backward(dout)
    assert missing_grads == [missing]
    torch.testing.assert_close(w.grad, expected.grad)
