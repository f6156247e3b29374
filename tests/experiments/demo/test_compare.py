"""The comparison with the naive form: losses, seconds, memory."""

from types import SimpleNamespace

import pytest
import torch

from crate_kernels._core import backends
from crate_kernels.experiments.demo import compare
from tests.experiments.demo.common import CPU, TINY


def test_the_fused_run_is_the_naive_run(training):
    for _ in range(4):
        training.step()
    result = compare.agreement(training)
    assert result.agrees
    assert result.fused == training.losses
    assert max(result.differences) < 1e-5
    assert max(result.bound) < 1e-4


@pytest.mark.parametrize("fault", [1e-3, float("nan")])
def test_a_fault_in_an_operator_is_seen(fault, training, monkeypatch):
    composite = backends.kernel("ista", "composite")
    inner = composite.forward
    monkeypatch.setattr(composite, "forward", lambda *args: inner(*args) * (1 + fault))
    for _ in range(4):
        training.step()
    assert not compare.agreement(training).agrees


def test_the_bound_is_thrice_what_rounding_alone_does(training, monkeypatch):
    # The naive run, the one in float64, and two from weights that are off by a bit.
    off = [[0, 0, 0, 0, 0], [0, 2e-5, 0, 0, 0], [0, 0, -1e-4, 0, 0], [0, 0, 0, 0, 1e-2]]
    runs = []

    def scripted(*args):
        torch.manual_seed(0)
        losses = iter([2.0 + x for x in off[len(runs)]])
        runs.append(SimpleNamespace(settings=TINY, model=torch.nn.Linear(8, 8), step=lambda: next(losses)))
        return runs[-1]

    training.losses = [2.0] * 5
    monkeypatch.setattr(compare, "Training", scripted)
    result = compare.agreement(training)
    assert result.noise == pytest.approx([0, 2e-5, 1e-4, 1e-4, 1e-2])
    assert result.bound == pytest.approx([1e-5 + 2 * 1.3e-6, 6e-5, 3e-4, 3e-4, 1e-3])

    naive, double, *perturbed = (run.model.weight.detach() for run in runs)
    assert torch.equal(double, naive.double())
    units = [(p / naive.double() - 1) / torch.finfo(torch.float32).eps for p in perturbed]
    assert not torch.equal(*units)
    for unit in units:
        assert unit.abs().max() <= 1.5  # one unit, plus half a unit from rounding the product
        assert unit.min() < 0 < unit.max()


LARGEST = {
    "numbers": ([2.0, 1.0, 4.0], 3.0),
    "a late NaN": ([1.0, 1.0, float("nan")], float("nan")),
    "an early NaN": ([float("nan"), 1.0, 4.0], float("nan")),
    "no step": ([], float("nan")),
}


@pytest.mark.parametrize(("fused", "largest"), LARGEST.values(), ids=LARGEST)
def test_the_largest_difference_is_not_hidden(fused, largest):
    count = len(fused)
    result = compare.Agreement(fused, naive=[1.0] * count, noise=[0.0] * count, bound=[9.0] * count)
    assert result.largest == pytest.approx(largest, nan_ok=True)


def test_chaos_is_no_agreement():
    far = compare.Agreement(fused=[2.0], naive=[2.07], noise=[0.1], bound=[compare.CHAOS])
    assert not far.agrees


def test_a_step_takes_the_median_of_its_rounds(small, monkeypatch):
    # Clock readings before and after (naive, fused) of three rounds.
    looks = iter([look for took in (1, 4, 9, 3, 2, 50) for look in (7, 7 + took)])
    monkeypatch.setattr(compare, "perf_counter", lambda: next(looks))
    made, fresh = [], compare.fresh_model
    monkeypatch.setattr(compare, "fresh_model", lambda *args: made.append(fresh(*args)) or made[-1])
    assert compare._cost(TINY, small, "composite", CPU, rounds=3).seconds == (2, 4)
    assert [model.config.backend for model in made] == ["reference", "composite"]
    # Gradients stay allocated between steps, so that a step's peak excludes them.
    assert all(p.grad is not None and not p.grad.any() for model in made for p in model.parameters())


def test_the_naive_form_takes_more_memory_the_more_tokens(small):
    found = compare.costs(TINY, small, "composite", CPU, rounds=1)
    assert [(c.patch_size, c.tokens) for c in found] == [(2, 17), (1, 65)]
    ratios = [naive / fused for naive, fused in (c.peak_bytes for c in found)]
    assert 1 < ratios[0] < ratios[1]
    assert all(min(c.seconds) > 0 for c in found)
