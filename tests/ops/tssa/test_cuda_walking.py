"""The walking kernels of the causal form on Hopper GPUs, emulated, against float64."""

import itertools

import pytest
import torch

from crate_kernels import testing
from crate_kernels._core import backends
from crate_kernels._triton import table
from crate_kernels.ops.tssa.call import TSSACall
from crate_kernels.ops.tssa.cuda import walking
from tests.ops.common import outputs_and_gradients, randn
from tests.ops.tssa.cuda import bias, call, temps, tokens
from tests.ops.tssa.persistent import MOST_SHARED
from tests.ops.tssa.walking import CASES, MORE, PAIRS, Walking, config, taking


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(pytest.param(name, torch.bfloat16, id=f"{name}-bf16") for name in CASES),
        *(pytest.param(name, torch.float16, id=f"{name}-fp16", marks=pytest.mark.exhaustive) for name in CASES),
        *(pytest.param(name, torch.bfloat16, id=f"{name}-bf16", marks=pytest.mark.exhaustive) for name in MORE),
    ],
)
def test_walking_kernels_are_within_budget(name, dtype, backend, hopper):
    given = Walking(name)
    hopper(given.config)
    given.check(backend, dtype)


@pytest.mark.parametrize("name", {**CASES, **MORE})
def test_a_step_fits_shared_memory(name):
    given = Walking(name)
    _, nheads, _, head_dim = given.case.shape
    assert all(walking.shared_bytes(nheads, head_dim, back, given.config) <= MOST_SHARED for back in (False, True))


def halves(*shape, seed=0):
    return tokens(*shape, dtype=torch.bfloat16, seed=seed)


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


def test_the_same_bits_in_any_order_of_threads_and_on_any_number_of_clusters(backend, hopper):
    found, inputs = [], (halves(3, 3, 190, 32), temps(3), bias(3, 190))
    for clusters, descending in ((1, False), (1, True), (3, False)):
        hopper(PAIRS, clusters, descending=descending)
        torch.manual_seed(3)
        with taking(PAIRS):
            found.append(outputs_and_gradients(call(True, backend, dropout_p=0.2), *inputs))
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def layouts(w):
    """Return the values of ``w`` in strides of which there are bulk copies."""
    batch, nheads, seqlen, head_dim = w.shape
    merged = w.transpose(1, 2).reshape(batch, seqlen, -1)
    cut = torch.cat([merged, merged.roll(1, -1)], -1)[..., : nheads * head_dim]
    return {
        "heads-apart": w.contiguous(),
        "cut-from-a-projection": cut.unflatten(-1, (nheads, head_dim)).transpose(1, 2),
        "reversed-batch": w.flip(0).contiguous().flip(0),
    }


@pytest.mark.parametrize("layout", layouts(torch.zeros(1, 1, 1, 1)))
def test_layouts_do_not_matter(layout, backend, hopper):
    hopper(PAIRS)
    (w, dout), found = (halves(2, 3, 90, 32, seed=seed) for seed in (0, 1)), []
    for one, other in ((w, dout), (layouts(w)[layout], dout), (w, layouts(dout)[layout])):
        leaf, temp = one.detach().requires_grad_(), temps(3).requires_grad_()
        with taking(PAIRS):
            out, membership = call(True, backend)(leaf, temp)
            found.append((out.detach(), membership.detach(), *torch.autograd.grad(out, [leaf, temp], other)))
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize(
    ("bounds", "longest"),
    [((2, 9, 9, 60), 51), ((0, 20, 21), 16), ((-7, 9, 300, 40), 40), ((50, 90, 90), 40)],
    ids=["gaps", "longer", "falling", "beyond"],
)
def test_packed_rows_of_no_sequence_are_zero(bounds, longest, backend, hopper):
    hopper(PAIRS)
    covered = torch.zeros(66, dtype=torch.bool)
    limits = [min(max(n, 0), 66) for n in bounds]
    for start, end in itertools.pairwise(limits):
        covered[start : min(end, start + longest)] = True
    options = TSSACall(cu_seqlens=torch.tensor(bounds, dtype=torch.int32), max_seqlen=longest)
    w, dout = (randn(66, 3, 32, seed=seed).bfloat16() for seed in (0, 1))
    with taking(PAIRS):
        kernel = backends.kernel("tssa", backend)
        out, membership = kernel.forward_causal(w, temps(3), None, options)
        dw, dtemp, _ = kernel.backward_causal(dout, None, w, temps(3), None, membership, options)
    assert dtemp.isfinite().all()
    for rows in (out, membership.t(), dw):
        assert rows.isfinite().all()
        if list(bounds) == sorted(bounds):
            assert not rows[~covered].any()
            assert rows[covered].flatten(1).any(1).all()


def test_dropout_drops_what_the_reference_drops(backend, hopper):
    hopper(PAIRS)
    outs = []
    with taking(PAIRS):
        for name in (backend, "reference"):
            torch.manual_seed(5)
            outs.append(call(True, name, dropout_p=0.4)(halves(2, 3, 90, 32), temps(3))[0])
    assert torch.equal(outs[0] == 0, outs[1] == 0)


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


@pytest.mark.parametrize("times", [1e-8, 2.0**60, 2.0**61], ids=["small", "large", "largest"])
def test_sums_near_the_ends_of_fp32(times, backend, hopper):
    """Reciprocals of the largest sums are below the least normal number, which the instruction alone makes 0."""
    hopper(PAIRS)
    w = (randn(2, 90, 3, 32) * times).bfloat16().transpose(1, 2)
    with taking(PAIRS):
        _, membership = call(True, backend)(w, temps(3))
    _, exact = call(True, "reference")(w.double(), temps(3).double())
    torch.testing.assert_close(membership.double(), exact, rtol=1e-4, atol=1e-6)


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


@pytest.mark.exhaustive
def test_half_precision_survives_squares_that_overflow(backend, hopper):
    hopper(PAIRS)
    case = testing.Case("tssa", "walking-overflow", (1, 3, 95, 32), {"causal": True}, magnitude=200.0)
    inputs = testing.make_inputs(case, torch.float16, "cpu")
    with taking(PAIRS):
        found = testing.run(case, inputs, backend)
    eager, exact = (testing.run(case, i, "reference") for i in (inputs, inputs.to(torch.float64)))
    assert [one for one in testing.measure(found, eager, exact, torch.float16) if not one.passed] == []
