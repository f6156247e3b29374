"""A step that repeats the one before is not checked again; one that differs in anything is."""

import copy
import pickle

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad

from crate_kernels import SubspaceCache, mssa
from crate_kernels._core import backends as registry
from crate_kernels._core import checks
from tests.ops.common import backends, randn

BATCH, HEADS, HEAD_DIM, CAPACITY = 2, 3, 8, 6
EACH = pytest.mark.parametrize(("backend", "device"), backends("mssa", reference=False))


def token(seed=1, new=1, head_dim=HEAD_DIM, dtype=torch.float32, device="cpu"):
    return randn(BATCH, HEADS, new, head_dim, seed=seed, dtype=dtype, device=device)


def warm_cache(steps=2, backend=None, device="cpu", **options):
    """A cache whose next step repeats the one before."""
    cache = SubspaceCache(BATCH, HEADS, CAPACITY, HEAD_DIM, device=device)
    for seed in range(steps):
        mssa(token(seed, device=device), causal=True, cache=cache, backend=backend, **options)
    return cache


def checked(monkeypatch):
    """Count the calls that check their arguments."""
    calls, check = [], checks.tensor
    monkeypatch.setattr(checks, "tensor", lambda *args: (calls.append(args[0]), check(*args))[1])
    return calls


@EACH
@pytest.mark.parametrize("return_lse", [False, True], ids=["out", "lse"])
@pytest.mark.parametrize("scale", [None, -0.7], ids=["scale-default", "scale-given"])
def test_a_repeated_step_is_a_first_one(monkeypatch, backend, device, return_lse, scale):
    calls = checked(monkeypatch)
    w, steps = token(new=CAPACITY, device=device), {}
    for way in ("repeated", "first"):
        cache, steps[way] = SubspaceCache(BATCH, HEADS, CAPACITY, HEAD_DIM, device=device), []
        for i in range(CAPACITY):
            cache._last = cache._last if way == "repeated" else None
            part = w[:, :, i : i + 1]
            result = mssa(part, causal=True, scale=scale, cache=cache, return_lse=return_lse, backend=backend)
            steps[way].append((result, cache.lengths.clone(), cache.data.clone(), cache._bound, cache._uniform))
        assert len(calls) == (1 if way == "repeated" else 1 + CAPACITY)
    for repeated, first in zip(*steps.values(), strict=True):
        torch.testing.assert_close(repeated[:3], first[:3], rtol=0, atol=0)
        assert repeated[3:] == first[3:]


@EACH
def test_ragged_lengths_are_those_of_the_step(monkeypatch, backend, device):
    mask, cache = torch.tensor([[True], [False]], device=device), warm_cache(0, device=device)
    calls = checked(monkeypatch)
    for _ in range(2):  # the values of a mask are checked each time
        mssa(token(device=device), causal=True, cache=cache, key_padding_mask=mask, backend=backend)
    mssa(token(2, device=device), causal=True, cache=cache, backend=backend)
    assert (len(calls), cache.lengths.tolist()) == (3, [3, 1])
    first = cache.clone()
    repeated = mssa(token(3, device=device), causal=True, cache=cache, backend=backend)
    assert (len(calls), cache.lengths.tolist()) == (3, [4, 2])
    expected = mssa(token(3, device=device), causal=True, cache=first, backend=backend)
    torch.testing.assert_close(repeated, expected, rtol=0, atol=0)


@EACH
def test_autograd_sees_that_a_repeated_step_overwrote_what_it_saved(backend, device):
    cache = warm_cache(2, backend, device)
    loss = (torch.ones((), device=device, requires_grad=True) * cache.data).sum()
    before = cache.lengths._version
    mssa(token(device=device), causal=True, cache=cache, backend=backend)
    assert cache.lengths._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_is_compiled_does_not_depend_on_the_step_before():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(lambda w, cache: mssa(w, causal=True, cache=cache), backend=counter, fullgraph=True)
    cache = warm_cache(0)
    for _ in range(3):
        step(token(), cache)
    graphs = counter.frame_count
    mssa(token(), causal=True, cache=cache)
    assert cache._last is not None
    step(token(), cache)
    assert counter.frame_count == graphs


# What the step after a warm one gets in place of its argument, and what it says.
WRONG = {
    "no-tensor": ({"w": None}, TypeError, "w must be a Tensor"),
    "list": ({"w": [[1.0]]}, TypeError, "w must be a Tensor"),
    "dimensions": ({"w": torch.zeros(HEADS, 1, HEAD_DIM)}, ValueError, "w must be \\(batch"),
    "batch": ({"w": torch.zeros(BATCH + 1, HEADS, 1, HEAD_DIM)}, ValueError, "w must match the cache"),
    "head_dim": ({"w": token(head_dim=HEAD_DIM * 2)}, ValueError, "w must match the cache"),
    "dtype": ({"w": token().double()}, ValueError, "cache's dtype"),
    "integers": ({"w": token().int()}, ValueError, "floating dtype"),
    "meta": ({"w": token().to("meta")}, ValueError, "cache's device"),
    "gradient": ({"w": token().requires_grad_()}, ValueError, "no_grad"),
    "not-causal": ({"causal": False}, ValueError, "causal must be True"),
    "causal-a-number": ({"causal": 1}, TypeError, "causal must be a bool"),
    "lse-a-number": ({"return_lse": 0}, TypeError, "return_lse must be a bool"),
    "scale-a-tensor": ({"scale": torch.tensor(0.5)}, TypeError, "scale must be a number"),
    "scale-a-bool": ({"scale": True}, TypeError, "scale must be a number"),
    "dropout": ({"dropout_p": 0.5}, ValueError, "dropout_p must be 0"),
    "dropout-a-bool": ({"dropout_p": False}, TypeError, "dropout_p must be a number"),
    "phi": ({"phi": "threshold", "threshold": 0.1}, ValueError, "phi must be 'softmax'"),
    "threshold": ({"threshold": 0.1}, ValueError, "threshold must be None"),
    "mask": ({"key_padding_mask": torch.ones(BATCH, 2, dtype=torch.bool)}, ValueError, "key_padding_mask must be"),
    "max_seqlen": ({"max_seqlen": 4}, ValueError, "max_seqlen must be None"),
    "backend": ({"backend": "nothing"}, ValueError, "backend must be None or one of"),
    "cache": ({"cache": object()}, TypeError, "cache must be a SubspaceCache"),
}


@pytest.mark.parametrize(("changed", "error", "said"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("options", [{}, {"scale": 1.0, "return_lse": True}], ids=["plain", "scale-lse"])
def test_a_step_that_differs_is_checked(changed, error, said, options):
    cache = warm_cache(**options)
    data, lengths = cache.data.clone(), cache.lengths.clone()
    with pytest.raises(error, match=said):
        mssa(**{"w": token(), "causal": True, "cache": cache, **options, **changed})
    torch.testing.assert_close([cache.data, cache.lengths], [data, lengths], rtol=0, atol=0)


def test_a_cache_that_is_full_says_so():
    cache = warm_cache(CAPACITY)
    with pytest.raises(ValueError, match="cache is full"):
        mssa(token(), causal=True, cache=cache)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_a_nested_tensor_is_refused():
    cache = warm_cache()
    w = torch.nested.nested_tensor([torch.zeros(HEADS, 1, HEAD_DIM)] * BATCH)
    with pytest.raises(NotImplementedError, match="must not be a nested tensor"):
        mssa(w, causal=True, cache=cache)


def test_a_forward_derivative_is_refused():
    cache = warm_cache()
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode AD"):
        mssa(forward_ad.make_dual(token(), token(2)), causal=True, cache=cache)


def test_autocast_is_obeyed():
    cache = SubspaceCache(BATCH, HEADS, CAPACITY, HEAD_DIM, torch.bfloat16)
    for _ in range(2):
        mssa(token(dtype=torch.bfloat16), causal=True, cache=cache)
    with torch.autocast("cpu", torch.bfloat16):
        assert mssa(token(), causal=True, cache=cache).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.float16), pytest.raises(ValueError, match="cache's dtype"):
        mssa(token(dtype=torch.bfloat16), causal=True, cache=cache)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@EACH
def test_a_repeated_step_is_cast_as_a_checked_one(monkeypatch, dtype, backend, device):
    calls, steps = checked(monkeypatch), {}
    for way in ("repeated", "first"):
        cache, steps[way] = SubspaceCache(BATCH, HEADS, CAPACITY, HEAD_DIM, torch.bfloat16, device), []
        for seed in range(CAPACITY):
            cache._last = cache._last if way == "repeated" else None
            with torch.autocast(device, torch.bfloat16):
                out = mssa(token(seed, dtype=dtype, device=device), causal=True, cache=cache, backend=backend)
            steps[way].append((out, cache.data.clone()))
        assert len(calls) == (1 if way == "repeated" else 1 + CAPACITY)
    torch.testing.assert_close(steps["repeated"], steps["first"], rtol=0, atol=0)


def test_the_profiler_sees_every_step():
    cache = warm_cache()
    with torch.profiler.profile() as profile:
        mssa(token(), causal=True, cache=cache)
    assert "crate_kernels::mssa_decode" in [event.name for event in profile.events() or ()]


def test_lengths_that_are_not_contiguous_are_counted():
    cache = warm_cache()
    pairs = torch.zeros(BATCH, 2, dtype=torch.int32)
    cache.lengths = pairs[:, 0]
    cache.lengths.fill_(2)
    for _ in range(2):
        mssa(token(), causal=True, cache=cache)
    assert pairs.tolist() == [[4, 0], [4, 0]]


@pytest.mark.parametrize(
    ("other", "error", "said"),
    [
        (torch.zeros(BATCH, HEADS, CAPACITY, HEAD_DIM).double(), ValueError, "cache's dtype"),
        (torch.zeros(BATCH, HEADS, CAPACITY, 2 * HEAD_DIM), ValueError, "must match the cache"),
        (torch.zeros(BATCH, HEADS, 2, HEAD_DIM), ValueError, "cache is full"),
    ],
    ids=["dtype", "head_dim", "capacity"],
)
def test_a_cache_whose_tensor_was_exchanged_is_checked(other, error, said):
    cache = warm_cache()
    cache.data = other
    with pytest.raises(error, match=said):
        mssa(token(), causal=True, cache=cache)


def test_a_cache_whose_memory_was_exchanged_is_checked():
    cache = warm_cache()
    cache.data.data = cache.data.data[:, :, :2].contiguous()
    with pytest.raises(ValueError, match="cache is full"):
        mssa(token(), causal=True, cache=cache)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache)), SubspaceCache.clone])
def test_a_copy_remembers_no_step(way):
    cache = warm_cache()
    assert cache._last is not None
    copied = way(cache)
    assert copied._last is None
    torch.testing.assert_close(mssa(token(), causal=True, cache=copied), mssa(token(), causal=True, cache=cache))


def test_a_kernel_that_refuses_leaves_the_step_to_the_others(monkeypatch):
    cache, asked = warm_cache(), []

    def refuse(*args):
        asked.append(args)
        raise registry.Refused("takes no repeated step")

    cache._last = cache._last._replace(kernel=("cpp", refuse))
    expected = mssa(token(), causal=True, cache=cache.clone())
    torch.testing.assert_close(mssa(token(), causal=True, cache=cache), expected, rtol=0, atol=0)
    assert len(asked) == 1
    assert cache.lengths.tolist() == [3, 3]


def test_reference_is_not_repeated():
    assert warm_cache(backend="reference")._last is None


def test_steps_of_inference_mode_and_others_do_not_meet():
    for mode in (torch.inference_mode(), torch.enable_grad()):
        with mode:
            cache = warm_cache(3)
            assert cache.lengths.tolist() == [3, 3]
