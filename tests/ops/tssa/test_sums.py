"""Sums over very many tokens, and over one: running sums keep what float32 would round off, w^2 / c is exact."""

import io

import pytest
import torch

from crate_kernels import TokenStatsCache, testing, tssa
from tests.ops.common import FORMS, backends, interpreted, over_tolerance, randn
from tests.ops.tssa.sums import DRAWN, drawn_within_tolerance, steps_add_up

EACH = pytest.mark.parametrize(("backend", "device"), backends("tssa"))
TRITON = [p for p in backends("tssa") if p.values[0] == "triton"]
QUICK = pytest.mark.parametrize(("backend", "device"), [p for p in backends("tssa") if not interpreted(*p.values)])


@EACH
@pytest.mark.parametrize("block", [1, 3], ids=["step", "block"])
def test_a_cache_keeps_what_each_step_adds(block, backend, device):
    steps_add_up(backend, device, block)


@QUICK
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


@EACH
@FORMS
def test_a_long_sequence_is_within_tolerance(causal, backend, device):
    length = (1_000 if causal else 5_000) if interpreted(backend, device) else 50_000
    case = testing.Case("tssa", "long", (1, 2, length, 4), {"causal": causal, "return_membership": True})
    assert over_tolerance(case, torch.float32, backend, device) == []


@pytest.mark.skipif(not TRITON, reason="needs a GPU, or TRITON_INTERPRET=1")
@pytest.mark.parametrize("size", [3, 132], ids=["3-sums", "132-sums"])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_a_scan_of_triton_rounds_many_chunks_once(reverse, size):
    from crate_kernels.ops.tssa.triton.scan import scan_chunks

    sums = (0.3 + 0.1 * torch.rand(2, 600, size)).to("cuda" if torch.cuda.is_available() else "cpu")
    exact = (sums.double().flip(1) if reverse else sums.double()).cumsum(1)
    exact = exact.flip(1) if reverse else exact
    torch.testing.assert_close(scan_chunks(sums.clone(), reverse), exact.float(), rtol=0, atol=0)


@EACH
def test_a_cache_of_float32_continues(backend, device):
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


@EACH
@pytest.mark.parametrize(("draw", "causal"), DRAWN.values(), ids=DRAWN)
def test_a_token_that_is_all_of_its_sums(draw, causal, backend, device):
    drawn_within_tolerance(draw, causal, backend, seeds=(7,) if interpreted(backend, device) else range(12))


@QUICK
@pytest.mark.parametrize("power", [12, 15, 16])
def test_gradients_of_tokens_whose_cubes_are_beyond_float32(power, backend, device):
    """What a causal backward carries is of the size of dout / w^3."""
    for seed, (seqlen, head_dim) in enumerate([(1, 4), (1, 20), (20, 8), (300, 8)]):
        w = 10.0**power * randn(1, 2, seqlen, head_dim, seed=seed)
        dout, temp = randn(1, 2, seqlen, head_dim, seed=seed + 9), torch.tensor([0.7, 1.2])
        found = {}
        for name, dtype in (("exact", torch.float64), ("eager", torch.float32), (backend, torch.float32)):
            leaves = [x.float().to(device, dtype).requires_grad_() for x in (w, temp)]
            out = tssa(*leaves, causal=True, backend=backend if name == backend else "reference")
            found[name] = [g.double() for g in torch.autograd.grad(out, leaves, dout.float().to(out))]
        for exact, eager, own in zip(*(found[name] for name in ("exact", "eager", backend)), strict=True):
            usual, error = ((x - exact).abs().max() for x in (eager, own))
            assert error <= 3 * (usual + torch.finfo(torch.float32).eps * exact.abs().max()), (seed, seqlen)
