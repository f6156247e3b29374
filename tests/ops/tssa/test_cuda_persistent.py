"""The persistent kernels of the full form on Hopper GPUs, emulated, against float64."""

import pytest
import torch

from crate_kernels._cuda import launch
from crate_kernels.ops.tssa import op
from tests.ops.common import outputs_and_gradients
from tests.ops.tssa.common import call, temps, tokens
from tests.ops.tssa.persistent import AHEAD, CASES, MORE, PAIRS, TWICE, Persistent, taking


@pytest.mark.parametrize("name", {**CASES, **MORE})
def test_what_fits_a_cluster(name):
    problem = Persistent(name)
    assert problem.fits() == [True, not problem.forward_alone]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_no_number_stays_in_its_sequence(value, backend, hopper):
    hopper(AHEAD)
    w = tokens(3, 8, 29, 48, dtype=torch.bfloat16)
    w[1, 1, 20, 3] = value
    with taking(AHEAD):
        out, membership, dw, _ = outputs_and_gradients(call(False, backend), w, temps(8))
    _, exact = call(False, "reference")(w.double(), temps(8).double())
    assert torch.equal(membership.isfinite(), exact.isfinite())
    for rows in (out, membership, dw):
        assert not rows[1].isfinite().all()
        assert rows[::2].isfinite().all()


def test_a_single_token_is_its_own_sum(backend, hopper):
    """Its w^2 / c is 1 whatever w is: two terms of the size of 1 / w cancel exactly, not to their rounding."""
    hopper(PAIRS)
    w = 1e-8 * tokens(4, 3, 1, 16)
    with taking(PAIRS):
        dw = outputs_and_gradients(call(False, backend), w.bfloat16(), temps(3))[2]
    exact = outputs_and_gradients(call(False, "reference"), w.bfloat16().double(), temps(3).double())[2]
    assert (dw.double() - exact).abs().max() <= torch.finfo(torch.bfloat16).eps * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_statistics_are_those_of_the_other_kernels(dtype, backend, hopper):
    """So that any backward follows any forward."""
    launched = hopper(AHEAD)
    mask = torch.rand(3, 30) > 0.3
    inputs = tokens(3, 8, 30, 48, dtype=dtype), temps(8)
    options = (mask, None, 0, torch.tensor(11), 0.3, 0)
    saved = [op.tssa_fwd(*inputs, *options, backend)[1:]]
    with taking(AHEAD):
        saved.append(op.tssa_fwd(*inputs, *options, backend)[1:])
        gradients = [
            op.tssa_bwd(inputs[0].flip(0), None, *inputs, *each, *options, name)
            for each in saved
            for name in (backend, "composite")
        ]
    assert {*launched()} == {"tssa_full_fwd_resident_kernel", *Persistent.kernels}
    torch.testing.assert_close(saved[1], saved[0], rtol=1e-5, atol=1e-7)
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=0.02, atol=2e-2)


@pytest.mark.exhaustive
def test_clusters_that_share_a_sequence_and_are_not_launched_together_are_found(backend, hopper, monkeypatch):
    hopper(TWICE)
    run = launch.run

    def one_by_one(kernel, shape, *rest):
        run(kernel, shape._replace(cooperative=False), *rest)

    monkeypatch.setattr(launch, "run", one_by_one)
    with pytest.raises(RuntimeError, match="emulator: threads wait for others"):
        Persistent("two-clusters").check(backend, torch.bfloat16)
