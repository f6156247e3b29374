"""tssa's CUDA kernels under the emulator: prefixes and decoding."""

import pytest
import torch

from crate_kernels import TokenStatsCache, testing
from tests.ops.common import DTYPES
from tests.ops.tssa.common import bias, call, temps, tokens
from tests.ops.tssa.sums import steps_add_up


@pytest.mark.parametrize("seqlen", [33, 133])
def test_causal_prefixes_do_not_depend_on_the_future(seqlen, backend):
    """Bit for bit: a running sum adds in the order of the tokens."""
    w = tokens(2, 3, seqlen, 16)
    other = torch.cat([w[:, :, :20], 5 * w[:, :, 20:]], dim=2)
    results = [call(True, backend)(x, temps(3), bias(3, seqlen)) for x in (w, other)]
    for one, another in zip(*results, strict=True):
        assert torch.equal(one[:, :, :20], another[:, :, :20])
        assert not torch.equal(one, another)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ragged", [False, True], ids=["even", "ragged"])
@pytest.mark.parametrize("longest", [40, 100], ids=["alone", "chunks"])
def test_decoding_continues_where_a_prompt_ends(longest, ragged, dtype, backend):
    w, b = tokens(3, 3, longest + 4, 16, dtype=dtype), bias(3, longest + 9)
    kept = torch.tensor([longest, 17, 0] if ragged else [longest] * 3)
    mask = torch.arange(longest) < kept[:, None] if ragged else None
    parts = [(0, 2, None), (2, longest + 2, mask), *((n, n + 1, None) for n in (longest + 2, longest + 3))]

    def decoded(w, name):
        # float64 all through for the oracle
        accumulate = torch.float64 if w.dtype == torch.float64 else torch.float32
        cache, named = TokenStatsCache(3, 3, 16, dtype=accumulate), {}
        for first, last, m in parts:
            step = call(True, name, cache=cache, key_padding_mask=m)
            out, membership = step(w[:, :, first:last], temps(3).to(accumulate), b.to(accumulate))
            named |= {f"out-{first}": out, f"membership-{first}": membership}
        assert cache.lengths.tolist() == (kept + 4).tolist()
        return named | dict(zip(("energy", "weighted", "mass"), cache._tensors(), strict=False))

    results = decoded(w, backend), decoded(w, "reference"), decoded(w.double(), "reference")
    assert [m for m in testing.measure(*results, dtype) if not m.passed] == []


def test_decoding_is_the_forward_token_by_token(backend):
    w, b, cache = tokens(2, 3, 12, 16), bias(3, 12), TokenStatsCache(2, 3, 16)
    steps = [call(True, backend, cache=cache)(w[:, :, n : n + 1], temps(3), b) for n in range(12)]
    out, membership = call(True, backend)(w, temps(3), b)
    torch.testing.assert_close(torch.cat([step[0] for step in steps], 2), out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.cat([step[1] for step in steps], 2), membership, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("block", [1, 70], ids=["step", "chunks"])
def test_a_cache_keeps_what_each_step_adds(block, backend):
    steps_add_up(backend, block=block)
