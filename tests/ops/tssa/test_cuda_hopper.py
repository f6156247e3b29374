"""The persistent and the walking kernels on Hopper GPUs, emulated, against float64: what holds for both."""

import pytest
import torch

from crate_kernels import testing
from tests.ops.common import outputs_and_gradients, randn
from tests.ops.tssa import persistent, uncovered, walking
from tests.ops.tssa.common import bias, call, halves, temps
from tests.ops.tssa.persistent import Persistent
from tests.ops.tssa.walking import Walking

EXHAUSTIVE = pytest.mark.exhaustive
KINDS = pytest.mark.parametrize("kind", [Persistent, Walking])


def named(kind, names, dtype, marks=()):
    short = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    return [
        pytest.param(kind, name, dtype, id=f"{kind.__name__.lower()}-{name}-{short}", marks=marks) for name in names
    ]


@pytest.mark.parametrize(
    ("kind", "name", "dtype"),
    [
        *named(Persistent, persistent.CASES, torch.bfloat16),
        *named(Persistent, ("196-tokens", "packed-dropout", "padded-scattered"), torch.float16),
        *named(Persistent, persistent.MORE, torch.bfloat16, EXHAUSTIVE),
        *named(Walking, walking.CASES, torch.bfloat16),
        *named(Walking, walking.CASES, torch.float16, EXHAUSTIVE),
        *named(Walking, walking.MORE, torch.bfloat16, EXHAUSTIVE),
    ],
)
def test_they_are_within_tolerance(kind, name, dtype, backend, hopper):
    problem = kind(name)
    hopper(problem.config)
    problem.check(backend, dtype)


@pytest.mark.parametrize(("kind", "name"), [(Persistent, "odd-heads"), (Walking, "few-tokens")])
def test_two_runs_have_the_same_bits(kind, name, backend, hopper, monkeypatch):
    problem = kind(name)
    hopper(problem.config)
    problem.check(backend, torch.bfloat16, twice=True)
    runs, run = [], testing.run
    monkeypatch.setattr(testing, "run", lambda *args: runs.append(run(*args)) or _moved(runs[-1], len(runs) == 2))
    with pytest.raises(AssertionError, match="two runs differ in their bits"):
        problem.check(backend, torch.bfloat16, twice=True)


def _moved(results, moved):
    """Return results whose first output is the next number, if ``moved``."""
    return {**results, "out": torch.nextafter(results["out"], 2 * results["out"])} if moved else results


@pytest.mark.parametrize(
    ("kind", "config", "seqlen"),
    [
        pytest.param(Persistent, Persistent.usual, 61, id="alone"),
        pytest.param(Persistent, persistent.config(4, 1, 192, 2), 61, id="together", marks=EXHAUSTIVE),
        pytest.param(Walking, Walking.usual, 190, id="walking"),
    ],
)
def test_the_same_bits_in_any_order_of_threads_and_on_any_number_of_clusters(kind, config, seqlen, backend, hopper):
    found, inputs = [], [halves(3, kind.nheads, seqlen, kind.head_dim), temps(kind.nheads)]
    if kind.causal:
        inputs.append(bias(kind.nheads, seqlen))
    for clusters, descending in ((1, False), (1, True), (3, False)):
        hopper(config, clusters, descending=descending)
        torch.manual_seed(3)
        with kind.taking(config):
            found.append(outputs_and_gradients(call(kind.causal, backend, dropout_p=0.2), *inputs))
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


@KINDS
@pytest.mark.parametrize("layout", layouts(torch.zeros(1, 1, 1, 1)))
def test_layouts_do_not_matter(layout, kind, backend, hopper):
    launched, found = hopper(kind.usual), []
    w, dout = (halves(3, kind.nheads, 150, kind.head_dim, seed=seed) for seed in (0, 1))
    for one, other in ((w, dout), (layouts(w)[layout], dout), (w, layouts(dout)[layout])):
        leaf, temp = one.detach().requires_grad_(), temps(kind.nheads).requires_grad_()
        with kind.taking(kind.usual):
            out, membership = call(kind.causal, backend)(leaf, temp)
            found.append((out.detach(), membership.detach(), *torch.autograd.grad(out, [leaf, temp], other)))
        assert {*kind.kernels} <= {*launched()}
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@KINDS
@pytest.mark.parametrize(
    ("bounds", "longest"),
    [((2, 9, 9, 60), 51), ((0, 20, 21), 16), ((-7, 9, 300, 40), 40), ((50, 90, 90), 40)],
    ids=["gaps", "longer", "falling", "beyond"],
)
def test_packed_rows_of_no_sequence_are_zero(bounds, longest, kind, backend, hopper):
    hopper(kind.usual)
    w = randn(66, kind.nheads, kind.head_dim).bfloat16()
    with kind.taking(kind.usual):
        uncovered.check(bounds, longest, kind.causal, backend, w, temps(kind.nheads))


@KINDS
def test_dropout_drops_what_the_reference_drops(kind, backend, hopper):
    hopper(kind.usual)
    w, outs = halves(2, kind.nheads, 90 if kind.causal else 29, kind.head_dim), []
    with kind.taking(kind.usual):
        for name in (backend, "reference"):
            torch.manual_seed(5)
            outs.append(call(kind.causal, name, dropout_p=0.4)(w, temps(kind.nheads))[0])
    assert torch.equal(outs[0] == 0, outs[1] == 0)


LARGE = (2.0**60, 2.0**61)


@pytest.mark.parametrize(
    ("kind", "config", "shape", "times"),
    [
        *((Persistent, persistent.PAIRS, (2, 25, 3, 16), times) for times in (1e-13, *LARGE)),
        *((Walking, walking.PAIRS, (2, 90, 3, 32), times) for times in (1e-8, *LARGE)),
    ],
)
def test_sums_near_the_ends_of_fp32(kind, config, shape, times, backend, hopper):
    """Reciprocals of the largest sums are below the smallest normal number, which the instruction alone makes 0."""
    hopper(config)
    w = (randn(*shape) * times).bfloat16().transpose(1, 2)
    with kind.taking(config):
        _, membership = call(kind.causal, backend)(w, temps(3))
    _, exact = call(kind.causal, "reference")(w.double(), temps(3).double())
    torch.testing.assert_close(membership.double(), exact, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "seqlen"), [(Persistent, 65), pytest.param(Walking, 95, marks=EXHAUSTIVE)], ids=["persistent", "walking"]
)
def test_half_precision_survives_squares_that_overflow(kind, seqlen, backend, hopper):
    hopper(kind.usual)
    shape = (1, kind.nheads, seqlen, kind.head_dim)
    case = testing.Case("tssa", "hopper-overflow", shape, {"causal": kind.causal}, magnitude=200.0)
    inputs = testing.make_inputs(case, torch.float16, "cpu")
    with kind.taking(kind.usual):
        found = testing.run(case, inputs, backend)
    eager, exact = (testing.run(case, i, "reference") for i in (inputs, inputs.to(torch.float64)))
    assert [one for one in testing.measure(found, eager, exact, torch.float16) if not one.passed] == []
