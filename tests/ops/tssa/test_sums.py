"""Sums over very many tokens, and over one: running sums keep what float32 would round off, w^2 / c is exact."""

import io

import pytest
import torch

from crate_kernels import TokenStatsCache, testing, tssa
from tests.apart.budget import FORWARD, GRADIENT, Budget
from tests.ops.common import backends, over_budget, randn
from tests.ops.tssa.sums import steps_add_up

EACH = pytest.mark.parametrize(("backend", "device"), backends("tssa"))
TRITON = [p for p in backends("tssa") if p.values[0] == "triton"]
# Triton multiplies by 1 / c, rounded once more: docs/tssa.md has what it costs.
DIVIDING = pytest.mark.parametrize(("backend", "device"), [p for p in backends("tssa") if p.values[0] != "triton"])


@EACH
@pytest.mark.parametrize("block", [1, 3], ids=["step", "block"])
def test_a_cache_keeps_what_each_step_adds(block, backend, device):
    steps_add_up(backend, device, block)


@DIVIDING
def test_thousands_of_drifting_steps(backend, device):
    """A step is as exact as if eager code had summed every token so far."""
    if backend == "reference":
        pytest.skip("needs a backend that is judged; reference is what judges")
    total = 3000
    w = (
        randn(1, 1, total, 4, dtype=torch.float32, device=device)
        * torch.linspace(0.1, 3, total, device=device)[:, None]
    )
    w, temp = w.expand(1, 2, total, 4), torch.tensor([0.8, 1.3], device=device)
    cache = TokenStatsCache(1, 2, 4, device=device)
    steps = [tssa(w[:, :, n : n + 1], temp, causal=True, cache=cache, backend=backend) for n in range(total)]
    eager, exact = (tssa(x, temp.to(x.dtype), causal=True, backend="reference") for x in (w, w.double()))
    found = testing.measure({"out": torch.cat(steps, 2)}, {"out": eager}, {"out": exact}, torch.float32)
    assert [m for m in found if not m.passed] == []


@DIVIDING
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_long_sequence_is_within_budget(causal, backend, device):
    case = testing.Case("tssa", "long", (1, 2, 50_000, 4), {"causal": causal, "return_membership": True})
    assert over_budget(case, torch.float32, backend, device) == []


@pytest.mark.skipif(not TRITON, reason="needs a GPU, or TRITON_INTERPRET=1")
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_a_scan_of_many_chunks_rounds_once(reverse):
    from crate_kernels.ops.tssa.triton.scan import scan_chunks

    sums = (0.3 + 0.1 * torch.rand(1, 600, 3)).to("cuda" if torch.cuda.is_available() else "cpu")
    exact = (sums.double().flip(1) if reverse else sums.double()).cumsum(1)
    exact = exact.flip(1) if reverse else exact
    torch.testing.assert_close(scan_chunks(sums.clone(), reverse), exact.float(), rtol=0, atol=0)


@EACH
def test_a_cache_of_float32_goes_on(backend, device):
    """As earlier versions saved it; its format is its dtype."""
    w, temp = randn(2, 3, 9, 8, dtype=torch.float32, device=device), torch.ones(3, device=device)
    cache, saved = TokenStatsCache(2, 3, 8, torch.float32, device), io.BytesIO()
    parts = [tssa(w[:, :, :5], temp, causal=True, cache=cache, backend=backend)]
    torch.save(cache, saved)
    saved.seek(0)
    cache = torch.load(saved, weights_only=False)
    parts += [tssa(w[:, :, n : n + 2], temp, causal=True, cache=cache, backend=backend) for n in (5, 7)]
    torch.testing.assert_close(torch.cat(parts, 2), tssa(w, temp, causal=True, backend=backend))
    assert [t.dtype for t in cache._tensors()] == [torch.float32] * 3 + [torch.int32]
    assert TokenStatsCache(2, 3, 8).energy.dtype == torch.float64


def test_a_device_without_float64_has_float32_sums(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "device", torch.device("mps"))
    cache = TokenStatsCache(2, 3, 8)
    monkeypatch.undo()
    assert cache.energy.dtype == torch.float32


def _temperatures(nheads, seed, least=10.0, most=30.0):
    return least + (most - least) * torch.rand(nheads, generator=torch.Generator().manual_seed(seed))


def _single(seed):
    """One token of few channels: q is their number, whatever the token is, and the temperature a factor on it."""
    return {"w": randn(2, 8, 1, 1 + seed % 3, seed=seed), "temp": _temperatures(8, seed)}, {}


def _one_kept(seed):
    seqlen = (2, 5, 20)[seed % 3]
    mask = torch.arange(seqlen).expand(2, seqlen) == seed % seqlen
    return {"w": randn(2, 2, seqlen, 8, seed=seed), "temp": _temperatures(2, seed, 0.3, 1.0)}, {
        "key_padding_mask": mask
    }


def _decades(seed):
    """Tokens from 1e-15 to 1e15, rising, falling or mixed: most have all of their sums."""
    generator = torch.Generator().manual_seed(seed)
    powers = torch.rand(20, generator=generator) * 30 - 15
    powers = (powers, powers.sort().values, powers.sort(descending=True).values)[seed % 3]
    return {"w": randn(2, 1, 20, 3, seed=seed) * 10 ** powers[:, None], "temp": _temperatures(1, seed, 0.3, 2.0)}, {}


def _growing_bias(seed):
    slopes = torch.rand(3, 1, generator=torch.Generator().manual_seed(seed))
    tensors = {"w": randn(1, 3, 300, 8, seed=seed), "temp": _temperatures(3, seed, 0.5, 2.0)}
    return tensors | {"denom_bias": 10 ** -(1 + seed % 3) * slopes * torch.arange(300)}, {}


DRAWN = {
    "single": (_single, False),
    "causal-single": (_single, True),
    "one-kept": (_one_kept, False),
    "causal-one-kept": (_one_kept, True),
    "decades": (_decades, False),
    "causal-decades": (_decades, True),
    "causal-growing-bias": (_growing_bias, True),
}


@DIVIDING
@pytest.mark.parametrize(("draw", "causal"), DRAWN.values(), ids=DRAWN)
def test_a_token_that_is_all_of_its_sums(draw, causal, backend, device):
    for seed in range(12):
        tensors, others = draw(seed)
        inputs = testing.Inputs(tensors, others).to(torch.float32)
        options = {"causal": causal, "return_membership": True}
        case = testing.Case("tssa", f"drawn-{seed}", tuple(tensors["w"].shape), options)

        def evaluate(tensors, cast, nudge, context, case=case, others=others):
            del nudge, context
            return testing.run(case, testing.Inputs(tensors, others).to(cast or torch.float32), "reference")

        budget = Budget(evaluate, inputs.differentiable, "float32")
        for name, value in testing.run(case, inputs, backend).items():
            budget.check_against(name, value, GRADIENT if name.startswith("d") else FORWARD, f"draw {seed}: ")
        budget.raise_if_over()
