"""A decoding step that repeats the one before is not checked again; one that differs in anything is."""

import copy
import pickle

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad

import crate_kernels
from crate_kernels import SubspaceCache, TokenStatsCache
from crate_kernels._core import backends, checks
from crate_kernels.ops.tssa.call import State
from tests.ops.common import VARIATION, randn
from tests.ops.decoding import calls, contents

BATCH, HEADS, HEAD_DIM, CAPACITY = 2, 3, 8, 6
OPS = pytest.mark.parametrize("op", ["mssa", "tssa"])
EACH = pytest.mark.parametrize(("op", "backend", "device"), calls(reference=False))


def token(seed=1, new=1, head_dim=HEAD_DIM, dtype=torch.float32, device="cpu"):
    return randn(BATCH, HEADS, new, head_dim, seed=seed, dtype=dtype, device=device)


def temp(device="cpu", dtype=torch.float32):
    return torch.linspace(0.5, 1.5, HEADS, device=device, dtype=dtype)


def biases(device="cpu"):
    return torch.linspace(0.1, 1.0, HEADS * CAPACITY, device=device).view(HEADS, CAPACITY)


def new_cache(op, dtype=None, device="cpu"):
    if op == "mssa":
        return SubspaceCache(BATCH, HEADS, CAPACITY, HEAD_DIM, dtype or torch.float32, device)
    return TokenStatsCache(BATCH, HEADS, HEAD_DIM, dtype, device)


def step(op, cache, w, **options):
    if op == "tssa" and "temp" not in options:
        options["temp"] = temp(cache.lengths.device)
    return getattr(crate_kernels, op)(**{"w": w, "causal": True, "cache": cache, **options})


def warm_cache(op, steps=2, device="cpu", **options):
    """A cache whose next step repeats the one before."""
    cache = new_cache(op, device=device)
    for seed in range(steps):
        step(op, cache, token(seed, device=device), **options)
    return cache


OFTEN = ("scale-lse", "columns", "bfloat16-membership", "float32")


def each_of(values):
    """List (op, backend, device, value) for the values of each operator; where Triton is interpreted, few of them."""
    return [
        pytest.param(*p.values, value, id=f"{p.id}-{value}", marks=p.marks if value in OFTEN else VARIATION or p.marks)
        for p in calls(reference=False)
        for value in values[p.values[0]]
    ]


@pytest.fixture
def checked(monkeypatch):
    """List the calls that check their tokens."""
    seen, check = [], checks.tensor
    monkeypatch.setattr(checks, "tensor", lambda *args: (args[1] == "w" and seen.append(args[0]), check(*args))[1])
    return seen


# Options of every step, and the dtypes of the cache and of the tokens.
KINDS = {
    "mssa": {
        "plain": {},
        "lse": {"return_lse": True},
        "scale": {"scale": -0.7},
        "scale-lse": {"scale": -0.7, "return_lse": True},
    },
    "tssa": {
        "plain": {},
        "membership": {"return_membership": True},
        "bias": {"denom_bias": biases},
        "columns": {
            "denom_bias": lambda device: biases(device)[..., None],
            "temp": lambda device: temp(device)[:, None],
            "return_membership": True,
        },
        "float32-sums": {"cache_dtype": torch.float32},
        "bfloat16": {"dtype": torch.bfloat16},
        "bfloat16-membership": {"dtype": torch.bfloat16, "return_membership": True},
    },
}


@pytest.mark.parametrize(("op", "backend", "device", "kind"), each_of(KINDS))
def test_a_repeated_step_is_a_first_one(checked, op, backend, device, kind):
    options = {k: value(device) if callable(value) else value for k, value in KINDS[op][kind].items()}
    dtypes = options.pop("cache_dtype", None), options.pop("dtype", torch.float32)
    w, steps = token(new=CAPACITY, device=device, dtype=dtypes[1]), {}
    for way in ("repeated", "first"):
        cache, steps[way] = new_cache(op, dtypes[0], device), []
        for i in range(CAPACITY):
            cache._last = cache._last if way == "repeated" else None
            result = step(op, cache, w[:, :, i : i + 1], backend=backend, **options)
            stored = [t.clone() for t in contents(cache)]
            steps[way].append((result, stored, cache._bound, getattr(cache, "_uniform", True)))
        assert len(checked) == (1 if way == "repeated" else 1 + CAPACITY)
    for repeated, first in zip(*steps.values(), strict=True):
        torch.testing.assert_close(repeated[:2], first[:2], rtol=0, atol=0)
        assert repeated[2:] == first[2:]


@EACH
def test_ragged_lengths_are_those_of_the_step(checked, op, backend, device):
    mask, cache = torch.tensor([[True], [False]], device=device), warm_cache(op, 0, device)
    for _ in range(2):  # the values of a mask are checked each time
        step(op, cache, token(device=device), key_padding_mask=mask, backend=backend)
    step(op, cache, token(2, device=device), backend=backend)
    assert (len(checked), cache.lengths.tolist()) == (3, [3, 1])
    first = cache.clone()
    repeated = step(op, cache, token(3, device=device), backend=backend)
    assert (len(checked), cache.lengths.tolist()) == (3, [4, 2])
    torch.testing.assert_close(repeated, step(op, first, token(3, device=device), backend=backend), rtol=0, atol=0)


@EACH
def test_autograd_sees_that_a_repeated_step_overwrote_what_it_saved(op, backend, device):
    cache = warm_cache(op, 4, device, backend=backend)
    saved = contents(cache)
    loss = (torch.ones((), device=device, requires_grad=True) * saved[0]).sum()
    before = [t._version for t in saved]
    step(op, cache, token(device=device), backend=backend)
    assert all(t._version > was for t, was in zip(saved, before, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@OPS
def test_what_is_compiled_does_not_depend_on_the_step_before(op):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda w, cache: step(op, cache, w), backend=counter, fullgraph=True)
    cache = warm_cache(op, 0)
    for _ in range(3):
        compiled(token(), cache)
    graphs = counter.frame_count
    step(op, cache, token())
    assert cache._last is not None
    compiled(token(), cache)
    assert counter.frame_count == graphs


# What the step after a warm one gets in place of its argument, and what it says.
COMMON = {
    "no-tensor": ({"w": None}, TypeError, "w must be a Tensor"),
    "list": ({"w": [[1.0]]}, TypeError, "w must be a Tensor"),
    "dimensions": ({"w": torch.zeros(HEADS, 1, HEAD_DIM)}, ValueError, "w must be \\(batch"),
    "batch": ({"w": torch.zeros(BATCH + 1, HEADS, 1, HEAD_DIM)}, ValueError, "w must match the cache"),
    "head_dim": ({"w": token(head_dim=HEAD_DIM * 2)}, ValueError, "w must match the cache"),
    "integers": ({"w": token().int()}, ValueError, "floating dtype"),
    "meta": ({"w": token().to("meta")}, ValueError, "device"),
    "gradient": ({"w": token().requires_grad_()}, ValueError, "no_grad"),
    "not-causal": ({"causal": False}, ValueError, "causal must be True"),
    "causal-a-number": ({"causal": 1}, TypeError, "causal must be a bool"),
    "dropout": ({"dropout_p": 0.5}, ValueError, "dropout_p must be 0"),
    "dropout-a-bool": ({"dropout_p": False}, TypeError, "dropout_p must be a number"),
    "mask": ({"key_padding_mask": torch.ones(BATCH, 2, dtype=torch.bool)}, ValueError, "key_padding_mask must be"),
    "max_seqlen": ({"max_seqlen": 4}, ValueError, "max_seqlen must be None"),
    "backend": ({"backend": "nothing"}, ValueError, "backend must be None or one of"),
    "cache": ({"cache": object()}, TypeError, "cache must be a (SubspaceCache|TokenStatsCache)"),
}
WRONG = {
    "mssa": {
        **COMMON,
        "dtype": ({"w": token().double()}, ValueError, "cache's dtype"),
        "lse-a-number": ({"return_lse": 0}, TypeError, "return_lse must be a bool"),
        "scale-a-tensor": ({"scale": torch.tensor(0.5)}, TypeError, "scale must be a number"),
        "scale-a-bool": ({"scale": True}, TypeError, "scale must be a number"),
        "phi": ({"phi": "threshold", "threshold": 0.1}, ValueError, "phi must be 'softmax'"),
        "threshold": ({"threshold": 0.1}, ValueError, "threshold must be None"),
    },
    "tssa": {
        **COMMON,
        "temp-gradient": ({"temp": temp().requires_grad_()}, ValueError, "no_grad"),
        "temp-shape": ({"temp": temp()[:2]}, ValueError, "temp must be \\(nheads"),
        "temp-dtype": ({"temp": temp().double()}, ValueError, "temp must be torch.float32"),
        "temp-a-number": ({"temp": 1.0}, TypeError, "temp must be a Tensor"),
        "bias-short": ({"denom_bias": biases()[:, :2]}, ValueError, "denom_bias must cover the sequence"),
        "membership-a-number": ({"return_membership": 0}, TypeError, "return_membership must be a bool"),
    },
}


WARM = {"mssa": ({}, {"scale": 1.0, "return_lse": True}), "tssa": ({"temp": temp()},)}  # options of steps before


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, cases in WRONG.items() for name in cases])
def test_a_step_that_differs_is_checked(op, name):
    changed, error, said = WRONG[op][name]
    for options in WARM[op]:
        cache = warm_cache(op, **options)
        before = [t.clone() for t in contents(cache)]
        with pytest.raises(error, match=said):
            step(op, **{"cache": cache, "w": token(), **options, **changed})
        torch.testing.assert_close(contents(cache), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("op", "options", "said"),
    [("mssa", {}, "cache is full"), ("tssa", {"denom_bias": biases()}, "denom_bias must cover the sequence")],
    ids=["places", "bias"],
)
def test_what_ends_says_so(op, options, said):
    cache = warm_cache(op, CAPACITY, **options)
    with pytest.raises(ValueError, match=said):
        step(op, cache, token(), **options)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize(("op", "name"), [("mssa", "w"), ("tssa", "w"), ("tssa", "temp")])
def test_a_nested_tensor_is_refused(op, name):
    nested = torch.nested.nested_tensor([torch.zeros(HEADS, 1, HEAD_DIM)] * BATCH)
    with pytest.raises((NotImplementedError, ValueError), match="nested"):
        step(op, **{"cache": warm_cache(op), "w": token(), name: nested})


@OPS
def test_a_forward_derivative_is_refused(op):
    cache = warm_cache(op)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode AD"):
        step(op, cache, forward_ad.make_dual(token(), token(2)))


def test_autocast_is_obeyed():
    cache = warm_cache("mssa", 0)
    cache.data = cache.data.bfloat16()
    for _ in range(2):
        step("mssa", cache, token(dtype=torch.bfloat16))
    with torch.autocast("cpu", torch.bfloat16):
        assert step("mssa", cache, token()).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.float16), pytest.raises(ValueError, match="cache's dtype"):
        step("mssa", cache, token(dtype=torch.bfloat16))


# Of the tokens under autocast, which casts those of mssa alone.
CAST = {"mssa": ("float32", "bfloat16", "float16"), "tssa": ("float32",)}


@pytest.mark.parametrize(("op", "backend", "device", "dtype"), each_of(CAST))
def test_a_repeated_step_is_cast_as_a_checked_one(checked, op, backend, device, dtype):
    steps = {}
    for way in ("repeated", "first"):
        cache, steps[way] = new_cache(op, torch.bfloat16 if op == "mssa" else None, device), []
        for seed in range(CAPACITY):
            cache._last = cache._last if way == "repeated" else None
            with torch.autocast(device, torch.bfloat16):
                out = step(op, cache, token(seed, dtype=getattr(torch, dtype), device=device), backend=backend)
            steps[way].append((out, contents(cache)[0].clone()))
        assert len(checked) == (1 if way == "repeated" else 1 + CAPACITY)
    torch.testing.assert_close(steps["repeated"], steps["first"], rtol=0, atol=0)


def test_sums_that_were_begun_without_autocast_are_not_cast_with_it(checked):
    cache = warm_cache("tssa", 3)
    expected = step("tssa", cache.clone(), token())
    checked.clear()
    with torch.autocast("cpu", torch.bfloat16):
        found = step("tssa", cache, token())
    assert checked == []
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@OPS
def test_the_profiler_sees_every_step(op):
    cache = warm_cache(op)
    with torch.profiler.profile() as profile:
        step(op, cache, token())
    assert f"crate_kernels::{op}_decode" in [event.name for event in profile.events() or ()]


def test_lengths_that_are_not_contiguous_are_counted():
    cache = warm_cache("mssa")
    pairs = torch.zeros(BATCH, 2, dtype=torch.int32)
    cache.lengths = pairs[:, 0]
    cache.lengths.fill_(2)
    for _ in range(2):
        step("mssa", cache, token())
    assert pairs.tolist() == [[4, 0], [4, 0]]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (torch.zeros(BATCH, HEADS, CAPACITY, HEAD_DIM).double(), "cache's dtype"),
        (torch.zeros(BATCH, HEADS, CAPACITY, 2 * HEAD_DIM), "must match the cache"),
        (torch.zeros(BATCH, HEADS, 2, HEAD_DIM), "cache is full"),
    ],
    ids=["dtype", "head_dim", "capacity"],
)
def test_a_cache_whose_tokens_were_exchanged_is_checked(other, said):
    cache = warm_cache("mssa")
    cache.data = other
    with pytest.raises(ValueError, match=said):
        step("mssa", cache, token())


def test_a_cache_whose_memory_was_exchanged_is_checked():
    cache = warm_cache("mssa")
    cache.data.data = cache.data.data[:, :, :2].contiguous()
    with pytest.raises(ValueError, match="cache is full"):
        step("mssa", cache, token())


@pytest.mark.parametrize("name", State._fields)
def test_sums_that_were_exchanged_are_checked(checked, name):
    cache = warm_cache("tssa")
    expected = step("tssa", cache.clone(), token())
    checked.clear()
    setattr(cache, name, getattr(cache, name).clone())
    torch.testing.assert_close(step("tssa", cache, token()), expected, rtol=0, atol=0)
    assert checked == ["tssa"]
    getattr(cache, name).data = getattr(cache, name)[..., None].clone()
    with pytest.raises((ValueError, RuntimeError), match="tssa: cache"):
        step("tssa", cache, token())
    assert checked == ["tssa"] * 2


@pytest.mark.parametrize(
    "way",
    [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache)), lambda cache: cache.clone()],
    ids=["deepcopy", "pickle", "clone"],
)
@OPS
def test_a_copy_remembers_no_step(op, way):
    cache = warm_cache(op)
    assert cache._last is not None
    copied = way(cache)
    assert copied._last is None
    torch.testing.assert_close(step(op, copied, token()), step(op, cache, token()), rtol=0, atol=0)


def test_a_kernel_that_refuses_leaves_the_step_to_the_others():
    cache, asked = warm_cache("mssa"), []

    def refuse(*args):
        asked.append(args)
        raise backends.Refused("takes no repeated step")

    cache._last = cache._last._replace(kernel=("cpp", refuse))
    expected = step("mssa", cache.clone(), token())
    torch.testing.assert_close(step("mssa", cache, token()), expected, rtol=0, atol=0)
    assert len(asked) == 1
    assert cache.lengths.tolist() == [3, 3]


@OPS
def test_reference_is_not_repeated(op):
    assert warm_cache(op, backend="reference")._last is None


@OPS
def test_steps_of_inference_mode_and_others_do_not_meet(op):
    for mode in (torch.inference_mode(), torch.enable_grad()):
        with mode:
            assert warm_cache(op, 3).lengths.tolist() == [3, 3]
    with torch.inference_mode():
        cache = warm_cache("tssa", 3)
    with pytest.raises((ValueError, RuntimeError), match="inference"):
        step("tssa", cache, token())
