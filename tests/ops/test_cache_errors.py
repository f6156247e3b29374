"""What a cache refuses, with what words, and that it is left as it was."""

import pytest
import torch

from crate_kernels import SubspaceCache, TokenStatsCache, mssa, tssa
from tests.ops.common import offsets
from tests.ops.decoding import BATCH, HEAD_DIM, HEADS, TEMP, attend, calls, contents, new_cache, tokens


def full_cache(op):
    cache = new_cache(op)
    attend(op, tokens(10), "reference", cache)
    return cache


def narrow():
    """Return a cache of sums that tokens of float64 have no use for."""
    return TokenStatsCache(BATCH, HEADS, HEAD_DIM, torch.float32)


def decode_with(op, w=None, **options):
    """Return a call that appends two tokens to a cache of ten."""
    w = tokens(2) if w is None else w
    function, arguments = (mssa, (w,)) if op == "mssa" else (tssa, (w, TEMP.to(w.device)))
    return lambda cache: function(*arguments, **{"causal": True, "cache": cache, **options})


def requiring_grad(tensor):
    return tensor.clone().requires_grad_()


LEFT = torch.tensor([[True, True], [False, True], [True, True]])
PACKED = {"cu_seqlens": offsets((2, 4)), "max_seqlen": 4}
ERRORS = [
    (
        "full",
        "mssa",
        decode_with("mssa", tokens(3)),
        ValueError,
        "capacity is 12 .* up to 10 are stored and 3 more came",
    ),
    (
        "dtype",
        "mssa",
        decode_with("mssa", tokens(2).half()),
        ValueError,
        "cache's dtype torch.float32, got torch.float16",
    ),
    ("device", "mssa", decode_with("mssa", tokens(2, device="meta")), ValueError, "cache's device cpu, got meta"),
    (
        "batch",
        "mssa",
        decode_with("mssa", tokens(2)[:2]),
        ValueError,
        r"match the cache, \(3, 3, seqlen, 8\), got \(2,",
    ),
    (
        "head-dim",
        "mssa",
        decode_with("mssa", tokens(2)[..., :4]),
        ValueError,
        r"match the cache, .* got \(3, 3, 2, 4\)",
    ),
    ("phi", "mssa", decode_with("mssa", phi="relu"), ValueError, "phi must be 'softmax' with a cache, got 'relu'"),
    (
        "heads",
        "tssa",
        decode_with("tssa", tokens(2)[:2]),
        ValueError,
        r"match the cache, \(3, 3, seqlen, 8\), got \(2,",
    ),
    ("device", "tssa", decode_with("tssa", tokens(2, device="meta")), ValueError, "cache's device cpu, got meta"),
    (
        "dtype",
        "tssa",
        lambda cache: tssa(tokens(2).double(), TEMP, causal=True, cache=narrow()),
        ValueError,
        "cache must be torch.float64 for torch.float64 tokens, got torch.float32",
    ),
    (
        "temp-requires-grad",
        "tssa",
        lambda cache: tssa(tokens(2), requiring_grad(TEMP), causal=True, cache=cache),
        ValueError,
        "temp must not require a gradient with a cache.*no_grad",
    ),
    (
        "denom-bias",
        "tssa",
        decode_with("tssa", denom_bias=torch.zeros(HEADS, 11)),
        ValueError,
        r"denom_bias must cover the sequence, \(nheads, >= 12\), got \(3, 11\)",
    ),
    *(
        (name, op, call, kind, message)
        for op in ("mssa", "tssa")
        for name, call, kind, message in [
            ("full-form", decode_with(op, causal=False), ValueError, "causal must be True with a cache, got False"),
            ("dropout", decode_with(op, dropout_p=0.1), ValueError, "dropout_p must be 0 with a cache, got 0.1"),
            (
                "requires-grad",
                decode_with(op, requiring_grad(tokens(2))),
                ValueError,
                "w must not require a gradient with a cache: wrap the call in torch.no_grad",
            ),
            ("left-padded", decode_with(op, key_padding_mask=LEFT), ValueError, "must be right-padded when a cache is"),
            ("mask-shape", decode_with(op, key_padding_mask=LEFT[:, :1]), ValueError, r"= \(3, 2\), got \(3, 1\)"),
            (
                "packed",
                decode_with(op, tokens(6)[0].transpose(0, 1), **PACKED),
                ValueError,
                "cu_seqlens must be None with a cache",
            ),
            (
                "wrong-cache",
                lambda cache, op=op: decode_with(op)(new_cache("tssa" if op == "mssa" else "mssa")),
                TypeError,
                "cache must be a (SubspaceCache, got TokenStatsCache|TokenStatsCache, got SubspaceCache)",
            ),
        ]
    ),
]


@pytest.mark.parametrize(("op", "call", "kind", "message"), [pytest.param(*e[1:], id=f"{e[1]}-{e[0]}") for e in ERRORS])
def test_an_error_leaves_the_cache_unchanged(op, call, kind, message):
    cache = full_cache(op)
    before = [t.clone() for t in contents(cache)]
    with pytest.raises(kind, match=f"^{op}: .*{message}"):
        call(cache)
    torch.testing.assert_close(contents(cache), before, rtol=0, atol=0)
    attend(op, tokens(2), "reference", cache)  # the refused call has taken no space


@pytest.mark.parametrize("steps", [0, 2])
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
