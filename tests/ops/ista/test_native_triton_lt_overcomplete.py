"""The products of ista_overcomplete that are cuBLASLt's: how many, of what bytes, and with which results."""

import pytest
import torch

from crate_kernels import ista_overcomplete, testing
from crate_kernels._core import plan
from crate_kernels._triton.table import forced
from crate_kernels.cli.tune import judge
from crate_kernels.ops.ista import call as ista_call
from crate_kernels.ops.ista.triton import tables
from tests.gpu import smoke
from tests.ops.common import TURNS, over_tolerance, randn
from tests.ops.ista.test_native_triton_lt import HALF, HALVES, pytestmark  # noqa: F401  # of this module too
from tests.tools import lt as standin

TOKENS, DIM, HIDDEN = 80, 32, 128
SHAPE = (2, TOKENS // 2, DIM, HIDDEN)


def counts(cublaslt):
    return tuple(standin.number(cublaslt, name).value for name in ("multiplied", "gated", "searched"))


def case(name, **options):
    return testing.Case("ista_overcomplete", f"lt-{name}", SHAPE, options, special="tied" if name == "tied" else "")


# steps: products by cuBLASLt, those with a gate, and searches: equal shapes are searched for once.
STEPS = {1: (2, 1, 2), 2: (5, 2, 4), 3: (8, 3, 4)}


@TURNS
@HALVES
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("dictionary", ["tied", "decoder"])
def test_products_without_a_threshold_or_a_sum_over_tokens_are_its(dictionary, steps, dtype, cublaslt, unrepeated):
    assert over_tolerance(case(dictionary, steps=steps), dtype, "triton", "cpu") == []
    assert counts(cublaslt) == STEPS[steps]
    assert over_tolerance(case(dictionary, steps=steps), dtype, "triton", "cpu") == []
    assert counts(cublaslt)[2] == STEPS[steps][2]


@pytest.mark.parametrize("broken", ["scaled", "bits_from_the_top"])
def test_it_is_those_products_that_are_judged(broken, cublaslt, unrepeated):
    standin.number(cublaslt, broken).value = 1
    assert over_tolerance(case("decoder", lambd=0.3), HALF, "triton", "cpu")
    assert counts(cublaslt)[:2] == STEPS[2][:2]


def traffic_of(steps):
    from crate_kernels.ops.ista.triton import launch
    from tests.tools.traffic import Traffic

    x, dout = (randn(TOKENS, DIM, dtype=HALF, seed=seed) for seed in (0, 1))
    weight, decoder = (randn(DIM, HIDDEN, dtype=HALF, seed=seed) / 6 for seed in (2, 3))
    call = ista_call.OvercompleteCall(0.1, 0.1, steps)
    with Traffic() as forward:
        _, *saved = launch.forward_overcomplete(x, weight, decoder, True, call)
    with Traffic() as backward:
        launch.backward_overcomplete(dout, x, weight, decoder, *saved, call)
    return forward, backward


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_it_moves_what_fused_products_do_and_the_bits_of_gates(steps, cublaslt):
    by_lt = traffic_of(steps)
    with forced(tables.LINEAR, {"LT": 0}), forced(tables.GATED, {"LT": 0}):
        fused = traffic_of(steps)
    for size in (TOKENS * DIM, TOKENS * HIDDEN):
        assert [t.passes(size) for t in by_lt] == [t.passes(size) for t in fused]
    bits = TOKENS * HIDDEN // 8
    assert [t.passes(bits) for t in by_lt] == [(0, 0), (steps, steps)]
    assert [t.launches["_ista_bits_kernel"] for t in by_lt] == [0, steps]
    products = [sum(t.launches.values()) - t.launches["_ista_bits_kernel"] for t in by_lt]
    assert products == [steps, 0]  # those with a threshold
    assert [sum(t.launches.values()) for t in fused] == [2 * steps - 1, 2 * steps]


LAYOUTS = {
    "tokens": (lambda t: t.repeat_interleave(2, -1)[..., ::2], lambda t: t, 5),
    "columns": (lambda t: t, lambda t: t.t().contiguous().t(), 5),
    "apart": (lambda t: t, lambda t: t.repeat_interleave(2, -1)[..., ::2], 0),
}


@pytest.mark.parametrize(("tokens", "dictionary", "expected"), LAYOUTS.values(), ids=LAYOUTS)
def test_strides_are_copied_taken_or_refused(tokens, dictionary, expected, cublaslt, unrepeated):
    x, weight, dout = randn(40, DIM, dtype=HALF), randn(DIM, HIDDEN, dtype=HALF, seed=1) / 6, randn(40, DIM, seed=2)

    def run(x, weight, backend):
        inputs = [t.detach().requires_grad_() for t in (x, weight)]
        out = ista_overcomplete(*inputs, backend=backend)
        return out.detach(), *torch.autograd.grad(out, inputs, dout.to(out.dtype))

    if expected:
        found = run(tokens(x), dictionary(weight), "triton")
    else:
        with pytest.warns(UserWarning, match="tensors must be contiguous"):
            found = run(tokens(x), dictionary(weight), "triton")
    assert counts(cublaslt)[0] == expected
    for actual, exact in zip(found, run(x.double(), weight.double(), "reference"), strict=True):
        assert (actual.double() - exact).norm() <= 0.02 * exact.norm()


def test_under_autocast_they_are_its_too(cublaslt, unrepeated):
    x, weight = randn(40, DIM, dtype=torch.float32), randn(DIM, HIDDEN, dtype=torch.float32, seed=1) / 6
    inputs = x.requires_grad_(), weight.requires_grad_()
    with torch.autocast("cpu", HALF):
        out = ista_overcomplete(*inputs, backend="triton")
    dx, dweight = torch.autograd.grad(out.sum(), inputs)
    assert counts(cublaslt)[0] == STEPS[2][0]
    assert dx.dtype == dweight.dtype == torch.float32


def test_plans_repeat_them(cublaslt, repeated_calls):
    """The check of every plan compares the replay, which calls it again, with the bits of the first call."""
    plan.forget()
    inputs = randn(40, DIM, dtype=HALF).requires_grad_(), (randn(DIM, HIDDEN, dtype=HALF, seed=1) / 6).requires_grad_()
    out = ista_overcomplete(*inputs, backend="triton")
    torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert (repeated_calls.repeated, repeated_calls.refused) == (2, [])
    assert counts(cublaslt)[:2] == (2 * STEPS[2][0], 2 * STEPS[2][1])


@pytest.mark.parametrize("is_gated", [False, True], ids=["linear", "gated"])
def test_what_tuning_times_is_right(is_gated, cublaslt):
    from crate_kernels.ops.ista.triton import tune

    assert judge(tune._linear(40, 32, 128, is_gated, "cpu")())()
    assert counts(cublaslt)[:2] == (1, int(is_gated))


def test_a_gpu_times_them_beside_what_the_tables_have(cublaslt, unrepeated):
    assert all(milliseconds > 0 for milliseconds in smoke.beside_lt((8, 16, 128), "cpu", rounds=1).values())
    assert counts(cublaslt)[0] == 3 * STEPS[2][0]
    standin.number(cublaslt, "search_status").value = 1
    with (
        pytest.warns(UserWarning, match="it has no algorithm"),
        pytest.raises(AssertionError, match="cuBLASLt did not multiply"),
    ):
        smoke.beside_lt((16, 16, 128), "cpu", rounds=1)
