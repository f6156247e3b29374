"""What our kernels are timed against: each provider computes the operator, or says why it cannot; sizes that vary."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from crate_kernels import testing
from crate_kernels.ops.mssa import baselines
from crate_kernels.ops.mssa.call import DecodeCall
from tests.ops.common import randn

CPU = torch.device("cpu")
PROVIDERS = {one.name: one for one in baselines.PROVIDERS}
CASE = testing.Case("mssa", "compared", (2, 3, 17, 8))


def attend(query, keys, values, causal=False):
    """Return FlashAttention's result, whose tokens come before its heads."""
    q, k, v = (t.transpose(1, 2) for t in (query, keys, values))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def attend_over(query, keys, values, k, v, cache_seqlens):
    """Append a token behind ``cache_seqlens`` of them, in place, and attend."""
    for index, at in enumerate(cache_seqlens.tolist()):
        keys[index, at], values[index, at] = k[index, 0], v[index, 0]
    assert cache_seqlens.tolist() == [keys.shape[1] - 1] * len(keys)
    return attend(query, keys, values)


@pytest.fixture
def flash(monkeypatch):
    """Let a stand-in be FlashAttention."""
    made = SimpleNamespace(flash_attn_func=attend, flash_attn_with_kvcache=attend_over, __spec__=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "flash_attn", made)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["sdpa", "sdpa-math", "flash-attn"])
def test_a_provider_computes_the_operator(name, causal, flash):
    case = testing.Case("mssa", "compared", CASE.shape, {"causal": causal})
    w = randn(*case.shape, dtype=torch.float32)
    expected = testing.SPECS["mssa"].published(case)(w)
    expected = expected[0] if isinstance(expected, tuple) else expected
    torch.testing.assert_close(PROVIDERS[name].make(case)(w), expected)


REASONS = {
    "sdpa": None,
    "sdpa-math": "on a CPU sdpa is the flash kernel, and its math form is eager's",
    "sdpa-flash": "on a CPU sdpa is the flash kernel, and its math form is eager's",
    "sdpa-efficient": "PyTorch has it for GPUs only",
    "sdpa-cudnn": "PyTorch has it for GPUs only",
    "flex": None,
    "flash-attn": "flash-attn takes bf16 and fp16 tensors on GPUs",
}


def test_a_provider_says_why_it_cannot(flash):
    found = {name: one.unavailable_reason(CASE, torch.bfloat16, CPU) for name, one in PROVIDERS.items()}
    assert found == REASONS


def test_flash_attention_may_not_be_installed(monkeypatch):
    monkeypatch.setattr(baselines, "find_spec", lambda name: None)
    assert PROVIDERS["flash-attn"].unavailable_reason(CASE, torch.bfloat16, CPU) == "flash-attn is not installed"


@pytest.mark.parametrize("provider", ["sdpa", "flash-attn", "composite"])
def test_a_step_attends_over_the_cache_and_its_own_token(provider, flash):
    step = SimpleNamespace(shape=(2, 3, 9, 8))
    past, new = randn(2, 3, 9, 8, dtype=torch.float32), randn(2, 3, 1, 8, seed=1, dtype=torch.float32)
    every = torch.cat([past, new], 2)
    run, rewind = baselines.DECODING.make(step, provider, past, new)
    for _ in range(2):
        torch.testing.assert_close(run(), F.scaled_dot_product_attention(new, every, every))
        rewind()


RESIZED = {
    "seqlen": ("mssa", "seqlen", 100, lambda shape: (*shape[:2], 100, shape[3])),
    "batch": ("mssa", "batch", 5, lambda shape: (5, *shape[1:])),
    "dim": ("mssa", "dim", 4 * 64, lambda shape: (shape[0], 4 * 64 // shape[3], *shape[2:])),
    "of-a-layer": ("ista", "dim", 48, lambda shape: (*shape[:2], 48)),
    "hidden": ("ista_overcomplete", "dim", 48, lambda shape: (*shape[:2], 48, 48 * shape[3] // shape[2])),
}


@pytest.mark.parametrize(("op", "axis", "size", "expected"), RESIZED.values(), ids=RESIZED)
def test_a_timed_case_at_another_size(op, axis, size, expected):
    timed = testing.SPECS[op].timed[0]
    found = timed.resized(axis, size)
    assert found.case.shape == expected(timed.case.shape)
    assert str(found) == "x".join(map(str, found.case.shape))
    assert (found.axes, found.layer, found.case.options) == (timed.axes, timed.layer, timed.case.options)


@pytest.mark.parametrize(("bound", "rounded"), [(1, 64), (64, 64), (65, 128), (1000, 1024), (1025, 1152), (3000, 3072)])
def test_a_bound_that_many_steps_have_in_common_has_four_binary_digits(bound, rounded):
    call = DecodeCall(None, bound, True, 0.25, need_lse=True)
    assert call.rounded() == call._replace(bound=rounded, uniform=False)
