"""What a cache refuses, with what words, and that it is left as it was."""

import pytest
import torch

from crate_kernels import SubspaceCache, TokenStatsCache, mssa, tssa
from tests.ops.common import offsets, seldom
from tests.ops.decoding import BATCH, HEAD_DIM, HEADS, TEMP, attend, calls, contents, new_cache, tokens


def full_cache(op):
    cache = new_cache(op)
    attend(op, tokens(10), "reference", cache)
    return cache


def decode(op, **changes):
    """Append two tokens to a cache, some arguments being others."""
    options = {"w": tokens(2), "causal": True, **changes}
    if op == "mssa":
        return mssa(**options)
    return tssa(**{"temp": TEMP.to(options["w"].device), **options})


def requiring_grad(tensor):
    return tensor.clone().requires_grad_()


LEFT = torch.tensor([[True, True], [False, True], [True, True]])
PACKED = {"w": tokens(6)[0].transpose(0, 1), "cu_seqlens": offsets((2, 4)), "max_seqlen": 4}
NARROW = TokenStatsCache(BATCH, HEADS, HEAD_DIM, torch.float32)  # tokens of float64 have no use for it
BOTH = {
    "full-form": ({"causal": False}, ValueError, "causal must be True with a cache, got False"),
    "dropout": ({"dropout_p": 0.1}, ValueError, "dropout_p must be 0 with a cache, got 0.1"),
    "requires-grad": ({"w": requiring_grad(tokens(2))}, ValueError, "w must not require a gradient with a.*no_grad"),
    "left-padded": ({"key_padding_mask": LEFT}, ValueError, "must be right-padded when a cache is"),
    "mask-shape": ({"key_padding_mask": LEFT[:, :1]}, ValueError, r"= \(3, 2\), got \(3, 1\)"),
    "packed": (PACKED, ValueError, "cu_seqlens must be None with a cache"),
    "device": ({"w": tokens(2, device="meta")}, ValueError, "cache's device cpu, got meta"),
    "batch": ({"w": tokens(2)[:2]}, ValueError, r"match the cache, \(3, 3, seqlen, 8\), got \(2,"),
}
ERRORS = {
    "mssa": {
        **BOTH,
        "full": ({"w": tokens(3)}, ValueError, "capacity is 12 .* up to 10 are stored and 3 more came"),
        "dtype": ({"w": tokens(2).half()}, ValueError, "cache's dtype torch.float32, got torch.float16"),
        "head-dim": ({"w": tokens(2)[..., :4]}, ValueError, r"match the cache, .* got \(3, 3, 2, 4\)"),
        "phi": ({"phi": "relu"}, ValueError, "phi must be 'softmax' with a cache, got 'relu'"),
        "wrong-cache": ({"cache": new_cache("tssa")}, TypeError, "cache must be a SubspaceCache, got TokenStatsCache"),
    },
    "tssa": {
        **BOTH,
        "dtype": (
            {"w": tokens(2).double(), "cache": NARROW},
            ValueError,
            "cache must be torch.float64 .* got torch.float32",
        ),
        "temp-requires-grad": ({"temp": requiring_grad(TEMP)}, ValueError, "temp must not require .*cache.*no_grad"),
        "denom-bias": (
            {"denom_bias": torch.zeros(HEADS, 11)},
            ValueError,
            r"must cover the sequence, .*>= 12\), got \(3, 11\)",
        ),
        "wrong-cache": ({"cache": new_cache("mssa")}, TypeError, "cache must be a TokenStatsCache, got SubspaceCache"),
    },
}


@pytest.mark.parametrize(
    ("op", "changes", "kind", "message"),
    [pytest.param(op, *e, id=f"{op}-{name}") for op, errors in ERRORS.items() for name, e in errors.items()],
)
def test_an_error_leaves_the_cache_unchanged(op, changes, kind, message):
    cache = full_cache(op)
    before = [t.clone() for t in contents(cache)]
    with pytest.raises(kind, match=f"^{op}: .*{message}"):
        decode(op, **{"cache": cache, **changes})
    torch.testing.assert_close(contents(cache), before, rtol=0, atol=0)
    attend(op, tokens(2), "reference", cache)  # the refused call has taken no space


@pytest.mark.parametrize("steps", seldom([0, 2], 2))
@pytest.mark.parametrize(("op", "backend", "device"), calls(reference=True))
def test_a_cache_of_inference_mode_is_written_only_there(op, backend, device, steps):
    step = tokens(1).to(device)
    with torch.inference_mode():
        cache = new_cache(op, device=device)
        for _ in range(steps):  # a step that repeats the one before takes a shorter way
            attend(op, step, backend, cache)
    before = [t.clone() for t in contents(cache)]
    with pytest.raises(RuntimeError, match=f"^{op}: cache must not have been made under torch.inference_mode"):
        attend(op, step, backend, cache)
    torch.testing.assert_close(contents(cache), before, rtol=0, atol=0)
    with torch.inference_mode():
        attend(op, step, backend, cache)
    assert cache.lengths.tolist() == [steps + 1] * BATCH
    ordinary = new_cache(op, device=device)
    with torch.inference_mode():
        attend(op, step, backend, ordinary)
    attend(op, step, backend, ordinary)


METHODS = {
    "truncate-float": ("mssa", lambda c: c.truncate(2.5), TypeError, "truncate: lengths must be an int, got float"),
    "truncate-bool": ("mssa", lambda c: c.truncate(True), TypeError, "truncate: lengths must be an int, got bool"),
    "truncate-negative": ("mssa", lambda c: c.truncate(-1), ValueError, "truncate: lengths must be >= 0, got -1"),
    "truncate-shape": ("mssa", lambda c: c.truncate(torch.zeros(2).long()), ValueError, r"= \(3,\), got \(2,\)"),
    "truncate-dtype": ("mssa", lambda c: c.truncate(torch.zeros(3)), ValueError, "int32 or int64, got torch.float32"),
    "truncate-sums": ("tssa", lambda c: c.truncate(3), NotImplementedError, r"truncate: running sums .* clone\(\)"),
    "reorder-list": ("mssa", lambda c: c.reorder([0, 1, 2]), TypeError, "reorder: index must be a Tensor, got list"),
    "reorder-shape": ("tssa", lambda c: c.reorder(torch.zeros(4).long()), ValueError, r"= \(3,\), got \(4,\)"),
    "reorder-dtype": ("tssa", lambda c: c.reorder(torch.zeros(3)), ValueError, "int32 or int64, got torch.float32"),
    "reorder-beyond": ("mssa", lambda c: c.reorder(torch.tensor([0, 3, 1])), ValueError, r"0 to 2, got \[0, 3, 1\]"),
    "reorder-below": ("tssa", lambda c: c.reorder(torch.tensor([0, -1, 1])), ValueError, r"0 to 2, got \[0, -1, 1\]"),
    "reorder-device": (
        "mssa",
        lambda c: c.reorder(torch.zeros(3, dtype=torch.int64, device="meta")),
        ValueError,
        "index must be on the cache's device cpu, got meta",
    ),
}


@pytest.mark.parametrize(("op", "call", "kind", "message"), METHODS.values(), ids=METHODS)
def test_a_method_refuses(op, call, kind, message):
    cache = full_cache(op)
    with pytest.raises(kind, match=f"^(SubspaceCache|TokenStatsCache).*{message}"):
        call(cache)
    assert cache.lengths.tolist() == [10] * BATCH


CONSTRUCTORS = {
    "batch-zero": (lambda: SubspaceCache(0, 3, 12, 8), ValueError, "SubspaceCache: batch must be >= 1, got 0"),
    "float-size": (lambda: SubspaceCache(2, 3, 12.0, 8), TypeError, "max_seqlen must be an int, got float"),
    "bool-size": (lambda: TokenStatsCache(2, True, 8), TypeError, "TokenStatsCache: nheads must be an int, got bool"),
    "int-dtype": (lambda: SubspaceCache(2, 3, 12, 8, torch.int32), ValueError, "must be floating, got torch.int32"),
    "str-dtype": (lambda: SubspaceCache(2, 3, 12, 8, "fp32"), TypeError, "dtype must be a torch.dtype, got str"),
}


@pytest.mark.parametrize(("call", "kind", "message"), CONSTRUCTORS.values(), ids=CONSTRUCTORS)
def test_a_constructor_refuses(call, kind, message):
    with pytest.raises(kind, match=message):
        call()
