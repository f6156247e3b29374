"""The persistent kernels of the full form on Hopper GPUs, emulated, against float64."""

import itertools

import pytest
import torch

from crate_kernels import testing
from crate_kernels._core import backends
from crate_kernels._cuda import launch
from crate_kernels.ops.tssa import op
from crate_kernels.ops.tssa.call import TSSACall
from tests.ops.common import outputs_and_gradients, randn
from tests.ops.tssa.cuda import call, temps, tokens
from tests.ops.tssa.persistent import AHEAD, CASES, MORE, PAIRS, TWICE, Persistent, config, taking

FORWARD, BACKWARD = "tssa_full_fwd_persistent_kernel", "tssa_full_bwd_persistent_kernel"
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


FP16 = ("196-tokens", "packed-dropout", "padded-scattered")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(pytest.param(name, torch.bfloat16, id=f"{name}-bf16") for name in CASES),
        *(pytest.param(name, torch.float16, id=f"{name}-fp16") for name in FP16),
        *(pytest.param(name, torch.bfloat16, id=f"{name}-bf16", marks=pytest.mark.exhaustive) for name in MORE),
    ],
)
def test_persistent_kernels_are_within_budget(name, dtype, backend, hopper):
    given = Persistent(name)
    hopper(given.config)
    given.check(backend, dtype)


@pytest.mark.parametrize("name", {**CASES, **MORE})
def test_what_fits_a_cluster(name):
    given = Persistent(name)
    assert given.fits() == [True, not given.forward_alone]


def results(backend, seqlen=61, **options):
    inputs = (tokens(3, 8, seqlen, 48, dtype=torch.bfloat16), temps(8))
    torch.manual_seed(3)
    return outputs_and_gradients(call(False, backend, **options), *inputs)


@pytest.mark.parametrize(
    "config",
    [pytest.param(AHEAD, id="alone"), pytest.param(config(4, 1, 192, 2), id="together", marks=pytest.mark.exhaustive)],
)
def test_the_same_bits_in_any_order_of_threads_and_on_any_number_of_clusters(config, backend, hopper):
    found = []
    for clusters, descending in ((1, False), (1, True), (3, False)):
        hopper(config, clusters, descending=descending)
        with taking(config):
            found.append(results(backend, dropout_p=0.2))
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
    w, dout = (tokens(3, 8, 30, 48, dtype=torch.bfloat16, seed=seed) for seed in (0, 1))
    launched, found = hopper(AHEAD), []
    for one, other in ((w, dout), (layouts(w)[layout], dout), (w, layouts(dout)[layout])):
        leaf, temp = one.detach().requires_grad_(), temps(8).requires_grad_()
        with taking(AHEAD):
            out, membership = call(False, backend)(leaf, temp)
            found.append((out.detach(), membership.detach(), *torch.autograd.grad(out, [leaf, temp], other)))
        assert [*dict.fromkeys(launched())] == [FORWARD, BACKWARD]
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize(
    ("bounds", "longest"),
    [((2, 9, 9, 60), 51), ((0, 20, 21), 16), ((-7, 9, 300, 40), 40), ((50, 90, 90), 40)],
    ids=["gaps", "longer", "falling", "beyond"],
)
def test_packed_rows_of_no_sequence_are_zero(bounds, longest, backend, hopper):
    hopper(AHEAD)
    kernel = backends.kernel("tssa", backend)
    w, dout = (randn(66, 8, 48, seed=seed).bfloat16() for seed in (0, 1))
    covered = torch.zeros(66, dtype=torch.bool)
    limits = [min(max(n, 0), 66) for n in bounds]
    for start, end in itertools.pairwise(limits):
        covered[start : min(end, start + longest)] = True
    options = TSSACall(cu_seqlens=torch.tensor(bounds, dtype=torch.int32), max_seqlen=longest)
    with taking(AHEAD):
        out, *saved = kernel.forward(w, temps(8), options)
        dw, _ = kernel.backward(dout, None, w, temps(8), *saved, options)
    for rows in (out, saved[0].t(), dw):
        assert rows.isfinite().all()
        if list(bounds) == sorted(bounds):
            assert not rows[~covered].any()
            assert rows[covered].flatten(1).any(1).all()


def test_dropout_drops_what_the_reference_drops(backend, hopper):
    hopper(AHEAD)
    outs = []
    with taking(AHEAD):
        for name in (backend, "reference"):
            torch.manual_seed(5)
            w = tokens(2, 8, 29, 48, dtype=torch.bfloat16)
            outs.append(call(False, name, dropout_p=0.4)(w, temps(8))[0])
    assert torch.equal(outs[0] == 0, outs[1] == 0)


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


@pytest.mark.parametrize("times", [1e-13, 2.0**60, 2.0**61], ids=["small", "large", "largest"])
def test_sums_near_the_ends_of_fp32(times, backend, hopper):
    """Reciprocals of the largest sums are below the least normal number, which the instruction alone makes 0."""
    hopper(PAIRS)
    w = (randn(2, 25, 3, 16) * times).bfloat16().transpose(1, 2)
    with taking(PAIRS):
        _, membership = call(False, backend)(w, temps(3))
    _, exact = call(False, "reference")(w.double(), temps(3).double())
    torch.testing.assert_close(membership.double(), exact, rtol=1e-4, atol=1e-6)


def test_a_single_token_is_its_own_sum(backend, hopper):
    """Its w^2 / c is 1 whatever w is: two terms of the size of 1 / w cancel exactly, not to their rounding."""
    hopper(PAIRS)
    w = 1e-8 * tokens(4, 3, 1, 16)
    with taking(PAIRS):
        dw = outputs_and_gradients(call(False, backend), w.bfloat16(), temps(3))[2]
    exact = outputs_and_gradients(call(False, "reference"), w.bfloat16().double(), temps(3).double())[2]
    assert (dw.double() - exact).abs().max() <= torch.finfo(torch.bfloat16).eps * exact.abs().max()


def test_half_precision_survives_squares_that_overflow(backend, hopper):
    hopper(AHEAD)
    case = testing.Case("tssa", "persistent-overflow", (1, 8, 65, 48), {}, magnitude=200.0)
    inputs = testing.make_inputs(case, torch.float16, "cpu")
    with taking(AHEAD):
        found = testing.run(case, inputs, backend)
    eager, exact = (testing.run(case, i, "reference") for i in (inputs, inputs.to(torch.float64)))
    assert [one for one in testing.measure(found, eager, exact, torch.float16) if not one.passed] == []


@DTYPES
def test_statistics_are_those_of_the_other_kernels(dtype, backend, hopper):
    """So that any backward follows any forward."""
    launched = hopper(AHEAD)
    mask = torch.rand(3, 30) > 0.3
    inputs = tokens(3, 8, 30, 48, dtype=dtype), temps(8)
    options = (mask, None, 0, torch.tensor(11), 0.3)
    saved = [op.tssa_fwd(*inputs, *options, backend)[1:]]
    with taking(AHEAD):
        saved.append(op.tssa_fwd(*inputs, *options, backend)[1:])
        gradients = [
            op.tssa_bwd(inputs[0].flip(0), None, *inputs, *each, *options, name)
            for each in saved
            for name in (backend, "composite")
        ]
    assert {*launched()} == {"tssa_full_fwd_resident_kernel", FORWARD, BACKWARD}
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
