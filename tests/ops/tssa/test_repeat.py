"""A step that repeats the one before is not checked again; one that differs in anything is."""

import copy
import pickle

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad

from crate_kernels import TokenStatsCache, tssa
from crate_kernels._core import checks
from crate_kernels.ops.tssa.call import State
from tests.ops.common import backends, randn

BATCH, HEADS, HEAD_DIM, PLACES = 2, 3, 8, 6
EACH = pytest.mark.parametrize(("backend", "device"), backends("tssa", reference=False))


def token(seed=1, new=1, head_dim=HEAD_DIM, dtype=torch.float32, device="cpu"):
    return randn(BATCH, HEADS, new, head_dim, seed=seed, dtype=dtype, device=device)


def temp(device="cpu", dtype=torch.float32):
    return torch.linspace(0.5, 1.5, HEADS, device=device, dtype=dtype)


def biases(device="cpu"):
    return torch.linspace(0.1, 1.0, HEADS * PLACES, device=device).view(HEADS, PLACES)


def step(cache, w, **options):
    return tssa(w, options.pop("temp", temp(w.device)), causal=True, cache=cache, **options)


def warm_cache(steps=2, backend=None, device="cpu", dtype=None, **options):
    """A cache whose next step repeats the one before."""
    cache = TokenStatsCache(BATCH, HEADS, HEAD_DIM, dtype, device)
    for seed in range(steps):
        step(cache, token(seed, device=device), backend=backend, **options)
    return cache


def checked(monkeypatch):
    """Count the calls that check their tokens."""
    calls, check = [], checks.tensor
    monkeypatch.setattr(checks, "tensor", lambda *args: (args[1] == "w" and calls.append(args[0]), check(*args))[1])
    return calls


def sums(cache):
    return [t.clone() for t in cache._tensors()]


@pytest.mark.parametrize("return_membership", [False, True], ids=["out", "membership"])
@pytest.mark.parametrize("kind", ["plain", "bias", "columns", "float32-sums", "bfloat16"])
@EACH
def test_a_repeated_step_is_a_first_one(monkeypatch, kind, backend, device, return_membership):
    calls = checked(monkeypatch)
    options = {"return_membership": return_membership, "backend": backend, "temp": temp(device)}
    w = token(new=PLACES, device=device, dtype=torch.bfloat16 if kind == "bfloat16" else torch.float32)
    if kind in ("bias", "columns"):
        options["denom_bias"] = biases(device) if kind == "bias" else biases(device)[..., None]
    if kind == "columns":
        options["temp"] = options["temp"][:, None]
    steps = {}
    for way in ("repeated", "first"):
        dtype = torch.float32 if kind == "float32-sums" else None
        cache, steps[way] = TokenStatsCache(BATCH, HEADS, HEAD_DIM, dtype, device), []
        for i in range(PLACES):
            cache._last = cache._last if way == "repeated" else None
            result = step(cache, w[:, :, i : i + 1], **options)
            steps[way].append((result, sums(cache), cache._bound))
        assert len(calls) == (1 if way == "repeated" else 1 + PLACES)
    for repeated, first in zip(*steps.values(), strict=True):
        torch.testing.assert_close(repeated[:2], first[:2], rtol=0, atol=0)
        assert repeated[2] == first[2]


@EACH
def test_ragged_lengths_are_those_of_the_step(monkeypatch, backend, device):
    mask, cache = torch.tensor([[True], [False]], device=device), warm_cache(0, device=device)
    calls = checked(monkeypatch)
    for _ in range(2):  # the values of a mask are checked each time
        step(cache, token(device=device), key_padding_mask=mask, backend=backend)
    step(cache, token(2, device=device), backend=backend)
    assert (len(calls), cache.lengths.tolist()) == (3, [3, 1])
    first = cache.clone()
    repeated = step(cache, token(3, device=device), backend=backend)
    assert (len(calls), cache.lengths.tolist()) == (3, [4, 2])
    torch.testing.assert_close(repeated, step(first, token(3, device=device), backend=backend), rtol=0, atol=0)


@EACH
def test_autograd_sees_that_a_repeated_step_overwrote_what_it_saved(backend, device):
    cache = warm_cache(4, backend, device)
    loss = (torch.ones((), device=device, requires_grad=True) * cache.energy).sum()
    before = [t._version for t in cache._tensors()]
    step(cache, token(device=device), backend=backend)
    assert all(t._version > was for t, was in zip(cache._tensors(), before, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_is_compiled_does_not_depend_on_the_step_before():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda w, cache: step(cache, w), backend=counter, fullgraph=True)
    cache = warm_cache(0)
    for _ in range(3):
        compiled(token(), cache)
    graphs = counter.frame_count
    step(cache, token())
    assert cache._last is not None
    compiled(token(), cache)
    assert counter.frame_count == graphs


# What the step after a warm one gets in place of its argument, and what it says.
WRONG = {
    "no-tensor": ({"w": None}, TypeError, "w must be a Tensor"),
    "dimensions": ({"w": torch.zeros(HEADS, 1, HEAD_DIM)}, ValueError, "w must be \\(batch"),
    "batch": ({"w": torch.zeros(BATCH + 1, HEADS, 1, HEAD_DIM)}, ValueError, "w must match the cache"),
    "head_dim": ({"w": token(head_dim=HEAD_DIM * 2)}, ValueError, "w must match the cache"),
    "integers": ({"w": token().int()}, ValueError, "floating dtype"),
    "meta": ({"w": token().to("meta")}, ValueError, "device"),
    "gradient": ({"w": token().requires_grad_()}, ValueError, "no_grad"),
    "temp-gradient": ({"temp": temp().requires_grad_()}, ValueError, "no_grad"),
    "temp-shape": ({"temp": temp()[:2]}, ValueError, "temp must be \\(nheads"),
    "temp-dtype": ({"temp": temp().double()}, ValueError, "temp must be torch.float32"),
    "temp-a-number": ({"temp": 1.0}, TypeError, "temp must be a Tensor"),
    "bias-short": ({"denom_bias": biases()[:, :2]}, ValueError, "denom_bias must cover the sequence"),
    "not-causal": ({"causal": False}, ValueError, "causal must be True"),
    "causal-a-number": ({"causal": 1}, TypeError, "causal must be a bool"),
    "membership-a-number": ({"return_membership": 0}, TypeError, "return_membership must be a bool"),
    "dropout": ({"dropout_p": 0.5}, ValueError, "dropout_p must be 0"),
    "dropout-a-bool": ({"dropout_p": False}, TypeError, "dropout_p must be a number"),
    "mask": ({"key_padding_mask": torch.ones(BATCH, 2, dtype=torch.bool)}, ValueError, "key_padding_mask must be"),
    "max_seqlen": ({"max_seqlen": 4}, ValueError, "max_seqlen must be None"),
    "backend": ({"backend": "nothing"}, ValueError, "backend must be None or one of"),
    "cache": ({"cache": object()}, TypeError, "cache must be a TokenStatsCache"),
}


@pytest.mark.parametrize(("changed", "error", "said"), WRONG.values(), ids=WRONG)
def test_a_step_that_differs_is_checked(changed, error, said):
    cache = warm_cache()
    before = sums(cache)
    with pytest.raises(error, match=said):
        tssa(**{"w": token(), "temp": temp(), "causal": True, "cache": cache, **changed})
    torch.testing.assert_close(sums(cache), before, rtol=0, atol=0)


def test_a_bias_that_ends_says_so():
    cache = warm_cache(PLACES, denom_bias=biases())
    with pytest.raises(ValueError, match="denom_bias must cover the sequence"):
        step(cache, token(), denom_bias=biases())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("name", ["w", "temp"])
def test_a_nested_tensor_is_refused(name):
    nested = torch.nested.nested_tensor([torch.zeros(HEADS, 1, HEAD_DIM)] * BATCH)
    with pytest.raises((NotImplementedError, ValueError), match="nested"):
        tssa(**{"w": token(), "temp": temp(), "causal": True, "cache": warm_cache(), name: nested})


def test_a_forward_derivative_is_refused():
    cache = warm_cache()
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode AD"):
        step(cache, forward_ad.make_dual(token(), token(2)))


def test_a_repeated_step_under_autocast_casts_nothing(monkeypatch):
    cache, calls = warm_cache(3), checked(monkeypatch)
    expected = step(cache.clone(), token())
    calls.clear()
    with torch.autocast("cpu", torch.bfloat16):
        found = step(cache, token())
    assert calls == []
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_profiler_sees_every_step():
    cache = warm_cache()
    with torch.profiler.profile() as profile:
        step(cache, token())
    assert "crate_kernels::tssa_decode" in [event.name for event in profile.events() or ()]


@pytest.mark.parametrize("name", State._fields)
def test_a_cache_whose_tensor_was_exchanged_is_checked(monkeypatch, name):
    cache, calls = warm_cache(), checked(monkeypatch)
    expected = step(cache.clone(), token())
    calls.clear()
    setattr(cache, name, getattr(cache, name).clone())
    torch.testing.assert_close(step(cache, token()), expected, rtol=0, atol=0)
    assert calls == ["tssa"]


@pytest.mark.parametrize("name", State._fields)
def test_a_cache_whose_memory_was_exchanged_is_checked(monkeypatch, name):
    cache, calls = warm_cache(), checked(monkeypatch)
    getattr(cache, name).data = getattr(cache, name)[..., None].clone()
    with pytest.raises((ValueError, RuntimeError), match="tssa: cache"):
        step(cache, token())
    assert calls == ["tssa"]


@pytest.mark.parametrize("way", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c)), TokenStatsCache.clone])
def test_a_copy_remembers_no_step(way):
    cache = warm_cache()
    assert cache._last is not None
    copied = way(cache)
    assert copied._last is None
    torch.testing.assert_close(step(copied, token()), step(cache, token()), rtol=0, atol=0)


def test_reference_is_not_repeated():
    assert warm_cache(backend="reference")._last is None


def test_steps_of_inference_mode_and_others_do_not_meet():
    for mode in (torch.inference_mode(), torch.enable_grad()):
        with mode:
            assert warm_cache(3).lengths.tolist() == [3, 3]
    with torch.inference_mode():
        cache = warm_cache(3)
    with pytest.raises((ValueError, RuntimeError), match="inference"):
        step(cache, token())
