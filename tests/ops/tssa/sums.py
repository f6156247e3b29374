"""What the tests of tssa's sums share, under the emulator too."""

import torch

from crate_kernels import TokenStatsCache, testing, tssa
from tests.apart.tolerance import FORWARD, GRADIENT, ToleranceChecker
from tests.ops.common import randn
from tests.ops.tssa.common import bias, call, tokens

SEEN, STEPS = 1e6, 10  # of a square of 0.09, float32 keeps two bits beside the sums of so many tokens


def steps_add_up(backend, device="cpu", block=1):
    """Continue the sums of many tokens, some at a time, and compare each sum with the exact one."""
    cache = TokenStatsCache(2, 2, 4, device=device)
    for total, share in zip(cache._tensors(), (1.0, 0.5, 0.5), strict=False):
        total.fill_(SEEN * share)
    w, temp = torch.full((2, 2, block, 4), 0.3, device=device), torch.ones(2, device=device)
    for _ in range(STEPS):
        tssa(w, temp, causal=True, cache=cache, backend=backend)
    new = STEPS * block
    for total, added in zip(cache._tensors(), (0.09, 0.045, 0.5), strict=False):
        expected = SEEN * (1.0 if added == 0.09 else 0.5) + new * added
        torch.testing.assert_close(total, torch.full_like(total, expected), rtol=1e-9, atol=0)
    assert cache.lengths.tolist() == [new] * 2


def _temperatures(nheads, seed, low=10.0, high=30.0):
    return low + (high - low) * torch.rand(nheads, generator=torch.Generator().manual_seed(seed))


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


def _cancelling_bias(seed):
    """One token whose w^2 / c is 1 in each channel, and a bias near -1: q, and with it dtemp, is what that leaves."""
    bias = 1e-3 * randn(8, 1, seed=seed + 1) - 1
    return _single(seed)[0] | {"denom_bias": bias}, {}


def _short(seed):
    """Two to five tokens over 30 decades."""
    seqlen = (2, 3, 5)[seed % 3]
    powers = torch.rand(seqlen, generator=torch.Generator().manual_seed(seed)) * 30 - 15
    w = randn(2, 3, seqlen, (1, 3, 8)[seed % 3], seed=seed) * 10 ** powers[:, None]
    return {"w": w, "temp": _temperatures(3, seed, 0.3, 2.0)}, {}


def _equal(seed):
    """Tokens that are all one: each addition to a sum of them may round the same way."""
    w = randn(1, 2, 1, 16, seed=seed).expand(1, 2, (64, 129, 197)[seed % 3], 16)
    return {"w": w.contiguous(), "temp": _temperatures(2, seed, 0.3, 2.0)}, {}


DRAWN = {
    "single": (_single, False),
    "causal-single": (_single, True),
    "one-kept": (_one_kept, False),
    "causal-one-kept": (_one_kept, True),
    "short": (_short, False),
    "causal-short": (_short, True),
    "equal": (_equal, False),
    "causal-equal": (_equal, True),
    "decades": (_decades, False),
    "causal-decades": (_decades, True),
    "causal-growing-bias": (_growing_bias, True),
    "causal-cancelling-bias": (_cancelling_bias, True),
}


def drawn_within_tolerance(draw, causal, backend, seeds):
    """Compare ``backend`` on drawn tokens with float64, by eager's error there and on neighbours."""
    for seed in seeds:
        tensors, others = draw(seed)
        inputs = testing.Inputs(tensors, others).to(torch.float32)
        options = {"causal": causal, "return_membership": True}
        case = testing.Case("tssa", f"drawn-{seed}", tuple(tensors["w"].shape), options)

        def evaluate(tensors, cast, nudge, context, case=case, others=others):
            del nudge, context
            return testing.run(case, testing.Inputs(tensors, others).to(cast or torch.float32), "reference")

        checker = ToleranceChecker(evaluate, inputs.differentiable, "float32")
        for name, value in testing.run(case, inputs, backend).items():
            checker.check_against(name, value, GRADIENT if name.startswith("d") else FORWARD, f"draw {seed}: ")
        checker.raise_if_over()


DRAWS = range(4)


def measured(causal, backend, device, *draws):
    """Compare the gradients of ``out`` of three heads with float64.

    Those of several (w, dout) are judged as one: in a few numbers eager can be lucky.
    """

    def gradients(name, dtype):
        found = []
        for w, dout in draws:
            bias = (0.1 * randn(3, w.shape[2], seed=3, dtype=torch.float32),) * causal
            tensors = w, torch.tensor([0.8, 1.0, 1.3]), *bias
            leaves = [t.to(device, dtype).requires_grad_() for t in tensors]
            options = {"denom_bias": leaves[2]} if causal else {}
            out = tssa(*leaves[:2], causal=causal, backend=name, **options)
            found.append(torch.autograd.grad(out, leaves, dout.to(device, dtype)))
        return dict(zip(("dw", "dtemp", "ddenom_bias"), map(torch.stack, zip(*found, strict=True)), strict=False))

    eager, exact = gradients("reference", torch.float32), gradients("reference", torch.float64)
    return testing.measure(gradients(backend, torch.float32), eager, exact, torch.float32)


FLOORS = {"below": (False, 1e-13), "above": (False, 3e-12), "causal-below": (True, 1e-8), "causal-across": (True, 6e-7)}


def floored_within_tolerance(draw, causal, channel, backend, device="cpu"):
    """Compare gradients with float64 where a channel is ``channel`` times as large as others; ``draw`` takes a seed."""
    draws = [(draw(seed=n), draw(seed=n + 1)) for n in DRAWS]
    for w, _ in draws:
        w[..., 5] *= channel
    assert [m for m in measured(causal, backend, device, *draws) if not m.passed] == []


def distinct_heads(head_dim, causal, backend, device="cpu"):
    """A token by itself has q = head_dim whatever it is: logits far from zero and close to each other."""
    temp = 1 + 0.01 * randn(3, seed=7, dtype=torch.float32, device=device)
    inputs = (tokens(8, 3, 1, head_dim, device=device), temp, *((bias(3, 1, device),) if causal else ()))
    _, membership = call(causal, backend)(*inputs)
    _, exact = call(causal, "reference")(*(t.double() for t in inputs))
    assert ((membership.double() - exact).abs() <= 4 * torch.finfo(torch.float32).eps * exact).all()


def nearly_all_of_a_token(nheads, seed, head_dim, causal, backend, device="cpu"):
    """One head has it: logits are large and close, and what moves them is rounding unless it is added up with care."""
    options = {"causal": causal, "return_membership": True}
    case = testing.Case("tssa", "mixed-norms-wide", (1, nheads, 40, head_dim), options, special="mixed norms")
    inputs = testing.make_inputs(case, torch.float32, device, seed=seed)
    eager, exact = (testing.run(case, inputs.to(dtype), "reference") for dtype in (torch.float32, torch.float64))
    measured = testing.measure(testing.run(case, inputs, backend), eager, exact, torch.float32)
    assert [m for m in measured if not m.passed] == []
