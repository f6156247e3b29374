"""NaN and infinity stay in the sequence that has them; what is nearly infinite is a number."""

import pytest
import torch

from crate_kernels import SubspaceCache, mssa, tssa
from tests.ops.common import FORMS, TURNS, backends, offsets, outputs_and_gradients, randn

NHEADS, HEAD_DIM, LENGTHS = 2, 16, (3, 20, 0, 5, 33)
# NumPy warns where Triton's interpreter computes with inf and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
CALLS = [
    pytest.param(op, causal, *p.values, id=f"{op}-{'causal' if causal else 'full'}-{p.id}", marks=p.marks)
    for op in ("mssa", "tssa")
    for causal in (False, True)
    for p in backends(op)
]


def attend(op, w, backend, **options):
    """Return (out, lse) or (out, membership), tokens first."""
    if op == "mssa":
        out, statistic = mssa(w, return_lse=True, backend=backend, **options)
    else:
        out, statistic = tssa(
            w, torch.ones(NHEADS, device=w.device), return_membership=True, backend=backend, **options
        )
    return out, statistic.movedim(1, -1) if w.dim() == 4 else statistic.t()


@pytest.mark.parametrize(("op", "causal", "backend", "device"), CALLS)
def test_packed_sequences_do_not_see_what_others_hold(op, causal, backend, device):
    packing = {"cu_seqlens": offsets(LENGTHS).to(device), "max_seqlen": max(LENGTHS), "causal": causal}
    w = randn(sum(LENGTHS), NHEADS, HEAD_DIM, dtype=torch.float32, device=device)
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).to(device)
    others, results = sequence % 2 == 0, []
    for value in (0.0, torch.nan):
        tokens = torch.where(others[:, None, None], w, value)
        found = outputs_and_gradients(lambda x: attend(op, x, backend, **packing), tokens)
        results.append([x[others] for x in found])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


@pytest.mark.parametrize(("op", "causal", "backend", "device"), CALLS)
def test_sequences_of_a_batch_do_not_see_what_others_hold(op, causal, backend, device):
    w = randn(3, NHEADS, 33, HEAD_DIM, dtype=torch.float32, device=device)
    results = []
    for value in (0.0, torch.inf):
        tokens = w.clone()
        tokens[1] = value
        found = outputs_and_gradients(lambda x: attend(op, x, backend, causal=causal), tokens)
        results.append([x[::2] for x in found])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def own(seqlen):
    """The last token's score with itself is 3e38: finite in nats, and 4.3e38 in bits."""
    w = randn(1, 1, seqlen, HEAD_DIM, dtype=torch.float32)
    w[0, 0, -1] *= 3e38**0.5 / w[0, 0, -1].norm()
    return w


def others(seqlen):
    """The other tokens' scores with the last are 2.7e38; its own is infinite."""
    w = randn(1, 1, seqlen, HEAD_DIM, dtype=torch.float32).abs()
    w[0, 0, -1], w[0, 0, :-1, 0] = 0.0, 0.9
    w[0, 0, -1, 0] = 3e38
    return w


def every(seqlen):
    """The last token is large in every channel; magnitudes in a score with it add up to 3e38, its own is infinite."""
    w = randn(1, 1, seqlen, HEAD_DIM, dtype=torch.float32)
    w *= 30 / w.abs().sum(-1, keepdim=True)
    w[0, 0, -1] = 1e37
    return w


@TURNS
@FORMS
@pytest.mark.parametrize("draw", [own, others, every])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("backend", "device"), backends("mssa", reference=False))
def test_a_score_near_the_largest_number_is_a_number(draw, causal, dtype, backend, device):
    for seqlen in (1, 5, 70):
        w = draw(seqlen).to(device, dtype)
        out, lse = mssa(w, scale=1.0, causal=causal, return_lse=True, backend=backend)
        right, right_lse = mssa(w.double(), scale=1.0, causal=causal, return_lse=True, backend="reference")
        there = right_lse.abs() < torch.finfo(torch.float32).max
        bound = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps * w.abs().max().item()}
        torch.testing.assert_close(out.double()[there], right[there], **bound)
        torch.testing.assert_close(lse.double()[there], right_lse[there], rtol=1e-5, atol=1e-5)


def tall(seqlen):
    """A token that others attend to alone, or not at all: scores with it are 1e10 nats, with itself 1e20."""
    w = randn(1, 1, seqlen, HEAD_DIM, dtype=torch.float32)
    w[0, 0, seqlen // 2] *= 1e10
    return w


KERNELS = [p for p in backends("mssa", reference=False) if "composite" not in p.values]


@TURNS
@FORMS
@pytest.mark.parametrize("draw", [own, tall])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("backend", "device"), KERNELS)
def test_its_gradient_is_a_number_too(draw, causal, dtype, backend, device):
    for seqlen in (1, 5, 70, 140):
        w = draw(seqlen).to(device, dtype).requires_grad_()
        g = randn(*w.shape, seed=1, dtype=dtype, device=device)
        (dw,) = torch.autograd.grad(mssa(w, scale=1.0, causal=causal, backend=backend), w, g)
        exact = w.detach().double().requires_grad_()
        out = mssa(exact, scale=1.0, causal=causal, backend="reference")
        (right,) = torch.autograd.grad(out, exact, g.double())
        bound = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps * g.abs().max().item()}
        there = exact.norm(dim=-1) > 1e9
        torch.testing.assert_close(dw.double()[there], right[there], **bound)
        assert dw.isfinite().all()


def infinite(seqlen):
    """The last token's score with itself is infinite, in every order of its sum; all other scores are numbers."""
    w = randn(1, 1, seqlen, HEAD_DIM, dtype=torch.float32)
    w[0, 0, -1] = 1e30
    return w


def assert_last_is_infinite(out, lse):
    assert lse[0, 0, -1] == torch.inf
    assert lse[0, 0, :-1].isfinite().all()
    assert out[0, 0, -1].isnan().all()
    assert out[0, 0, :-1].isfinite().all()


@TURNS
@FORMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("backend", "device"), backends("mssa"))
def test_an_infinite_score_has_an_infinite_lse(causal, dtype, backend, device):
    """As eager has it: its row is no number, other rows are, and no gradient hides it."""
    for seqlen in (1, 5, 70, 140):
        w = infinite(seqlen).to(device, dtype).requires_grad_()
        out, lse = mssa(w, causal=causal, return_lse=True, backend=backend)
        assert_last_is_infinite(out, lse)
        for result in (out, lse):
            (dw,) = torch.autograd.grad(result, w, torch.ones_like(result), retain_graph=True)
            assert dw[0, 0, -1].isnan().all()


@pytest.mark.parametrize(("backend", "device"), backends("mssa"))
def test_a_step_with_a_score_near_the_largest_number_is_a_number(backend, device):
    w = own(5).to(device)
    cache = SubspaceCache(1, 1, 8, HEAD_DIM, device=device)
    mssa(w[:, :, :4], scale=1.0, causal=True, cache=cache, backend=backend)
    out, lse = mssa(w[:, :, 4:], scale=1.0, causal=True, cache=cache, return_lse=True, backend=backend)
    torch.testing.assert_close(out, w[:, :, 4:])
    torch.testing.assert_close(lse, w[:, :, 4:].double().square().sum(-1).float())


@pytest.mark.parametrize(("backend", "device"), backends("mssa"))
def test_a_step_with_an_infinite_score_has_an_infinite_lse(backend, device):
    w = infinite(5).to(device)
    cache = SubspaceCache(1, 1, 8, HEAD_DIM, device=device)
    mssa(w[:, :, :3], causal=True, cache=cache, backend=backend)
    assert_last_is_infinite(*mssa(w[:, :, 3:], causal=True, cache=cache, return_lse=True, backend=backend))
