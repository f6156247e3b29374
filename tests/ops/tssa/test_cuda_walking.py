"""The walking kernels of the causal form on Hopper GPUs, emulated, against float64."""

import pytest
import torch

from crate_kernels._triton import table
from crate_kernels.ops.tssa.cuda import walking
from tests.ops.common import outputs_and_gradients, randn
from tests.ops.tssa.common import bias, call, halves, temps
from tests.ops.tssa.persistent import MAX_SHARED
from tests.ops.tssa.walking import CASES, MORE, PAIRS, Walking, config, taking


@pytest.mark.parametrize("name", {**CASES, **MORE})
def test_a_step_fits_shared_memory(name):
    problem = Walking(name)
    _, nheads, _, head_dim = problem.case.shape
    assert all(walking.shared_bytes(nheads, head_dim, back, problem.config) <= MAX_SHARED for back in (False, True))


@pytest.fixture
def walked(backend):
    """Return what a call of these kernels returns, of so many tokens; dropout and padding are always the same."""
    keep = torch.rand(2, 200, generator=torch.Generator().manual_seed(2)) > 0.3

    def run(w, masked=False, **options):
        if masked:
            options["key_padding_mask"] = keep[:, : w.shape[2]]
        torch.manual_seed(3)
        with taking(PAIRS), torch.no_grad():
            return call(True, backend, dropout_p=0.2, **options)(w, temps(3), bias(3, 200))

    return run


@pytest.mark.parametrize(
    "masked", [pytest.param(False, id="all-kept"), pytest.param(True, id="padded", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("length", [1, 79, 80, 81, 163])
def test_no_bit_of_a_prefix_depends_on_later_tokens_or_on_how_many_there_are(length, masked, walked, hopper):
    hopper(PAIRS, clusters=2)
    w = halves(2, 3, 190, 32)
    other = torch.cat([w[:, :, :length], 5 * w[:, :, length:]], 2)
    every, alone, changed = (walked(x, masked) for x in (w, w[:, :, :length], other))
    for one, short, another in zip(every, alone, changed, strict=True):
        assert torch.equal(one[:, :, :length], short)
        assert torch.equal(one[:, :, :length], another[:, :, :length])
        assert not torch.equal(one, another)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_no_number_stays_in_its_sequence_behind_its_place(value, walked, hopper):
    hopper(PAIRS)
    w = halves(2, 3, 110, 32)
    usual = walked(w)
    w[1, 1, 70, 3] = value
    for one, other in zip(walked(w), usual, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1, :, :70], other[1, :, :70])
        assert not one[1, :, 70:].isfinite().all()


def test_a_first_token_is_its_own_sum(backend, hopper):
    """Its w^2 / c is 1 whatever w is: two terms of the size of 1 / w cancel exactly, not to their rounding."""
    hopper(PAIRS)
    w = (1e-5 * halves(4, 3, 1, 32)).bfloat16()
    with taking(PAIRS):
        dw = outputs_and_gradients(call(True, backend), w, temps(3))[2]
    exact = outputs_and_gradients(call(True, "reference"), w.double(), temps(3).double())[2]
    torch.testing.assert_close(dw.double(), exact, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", ["fwd", "bwd"])
def test_a_direction_follows_other_kernels(name, backend, hopper):
    """All save the same."""
    hopper(PAIRS)
    inputs = halves(2, 3, 97, 32), temps(3), bias(3, 97)
    with table.forced(walking.FORWARD if name == "fwd" else walking.BACKWARD, PAIRS):
        found = outputs_and_gradients(call(True, backend), *inputs)
    torch.testing.assert_close(found, outputs_and_gradients(call(True, backend), *inputs), rtol=0.02, atol=0.02)


def gradient_of(backend, dtype, w, dout, dmembership):
    """Return dw of a call, whose first head has nearly all of the membership."""
    w = w.to(dtype).requires_grad_()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    nheads, seqlen = w.shape[1:3]
    denom_bias = 0.15 * torch.eye(nheads, dtype=wide)[:, :1].expand(-1, seqlen).contiguous()
    out, membership = call(True, backend)(w, torch.ones(nheads, dtype=wide), denom_bias)
    return torch.autograd.grad((out, membership), w, (dout.to(out.dtype), dmembership.to(membership.dtype)))[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_part_of_dw_may_exceed_what_fp16_holds(dtype, backend, hopper):
    """What comes through the moments waits in 16 bits; what comes through the softmax takes nearly all of it back.

    The gradients of later energies, of this step and the one behind it, are large here, and small in the usual cases.
    """
    hopper(PAIRS)
    w, dout, dmembership = torch.zeros(1, 3, 90, 32), torch.zeros(1, 3, 90, 32), torch.zeros(1, 3, 90)
    w[:, 0, :, 0], dout[:, 0, :, 0] = 0.8, 6e4
    dout[:, :, 0] *= -1
    dmembership[:, 0] = 8e5 * torch.arange(1, 91)
    w, dout = w.to(dtype), dout.to(dtype)
    largest = torch.finfo(torch.float16).max
    alone, exact = (gradient_of("reference", torch.float64, w, dout, of) for of in (0 * dmembership, dmembership))
    assert exact.abs().max() < largest / 2 < largest < alone.max()
    with taking(PAIRS):
        found = gradient_of(backend, dtype, w, dout, dmembership)
    # Two roundings: of a part, nearly `alone`, and of the result.
    rounding = torch.finfo(dtype).eps / 2 * (alone.abs().max() + exact.abs().max()).item()
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1.01 * rounding)


@pytest.mark.exhaustive
def test_sums_of_many_steps_are_carried_in_double(backend, hopper):
    """Equal tokens round a sum in fp32 the same way each time; a large temp shows it in the membership."""
    one_token = config(2, 1, 96, 1)
    hopper(one_token)
    w = torch.tensor([1.1, 0.9, 1.3])[None, :, None, None].expand(1, 3, 1 << 14, 16)
    w = (w * (1 + 1e-2 * randn(16))).bfloat16().transpose(1, 2).contiguous().transpose(1, 2)
    w[:, 0, -1] *= 2
    temp = torch.full((3,), 2e3)
    with taking(one_token):
        _, membership = call(True, backend)(w, temp)
    _, exact = call(True, "reference")(w.double(), temp.double())
    torch.testing.assert_close(membership[..., -1:].double(), exact[..., -1:], rtol=3e-6, atol=0)
