"""What the tests of tssa's sums share, under the emulator too."""

import torch

from crate_kernels import TokenStatsCache, tssa

SEEN, STEPS = 1e6, 10  # of a square of 0.09, float32 keeps two bits beside the sums of so many tokens


def steps_add_up(backend, device="cpu", block=1):
    """Continue the sums of many tokens, some at a time, and hold each sum to what it must be."""
    cache = TokenStatsCache(2, 2, 4, device=device)
    for held, share in zip(cache._tensors(), (1.0, 0.5, 0.5), strict=False):
        held.fill_(SEEN * share)
    w, temp = torch.full((2, 2, block, 4), 0.3, device=device), torch.ones(2, device=device)
    for _ in range(STEPS):
        tssa(w, temp, causal=True, cache=cache, backend=backend)
    new = STEPS * block
    for held, added in zip(cache._tensors(), (0.09, 0.045, 0.5), strict=False):
        expected = SEEN * (1.0 if added == 0.09 else 0.5) + new * added
        torch.testing.assert_close(held, torch.full_like(held, expected), rtol=1e-9, atol=0)
    assert cache.lengths.tolist() == [new] * 2
