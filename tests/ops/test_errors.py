"""Bad input: each is refused by the public function, in one form of words."""

import re
from fractions import Fraction

import numpy
import pytest
import torch

import crate_kernels
from crate_kernels._core import backends, checks
from tests.ops.common import offsets, randn

INF, NAN = float("inf"), float("nan")
W, PACKED, TEMP = randn(2, 3, 4, 8).float(), randn(6, 3, 8).float(), torch.ones(3)
X, WEIGHT, DICTIONARY = randn(5, 8).float(), randn(8, 8).float(), randn(8, 12).float()
MASK, META = torch.ones(2, 4, dtype=torch.bool), torch.device("meta")
BOTH, ALL = ("mssa", "tssa"), ("mssa", "tssa", "ista", "ista_overcomplete")


def packing(*bounds, longest=4, dtype=torch.int32):
    return {"w": PACKED, "cu_seqlens": torch.tensor(bounds, dtype=dtype), "max_seqlen": longest}


SHARED = {
    "rank": ({"w": W[0]}, r"w must be \(batch, nheads, seqlen, head_dim\), got \(3, 4, 8\)"),
    "packed-rank": ({**packing(0, 6), "w": W}, r"w must be \(total, nheads, head_dim\) with cu_seqlens, got"),
    "integer": ({"w": W.int()}, "w must have a floating dtype, got torch.int32"),
    "complex": ({"w": W.to(torch.complex64)}, "w must have a floating dtype, got torch.complex64"),
    "dropout-one": ({"dropout_p": 1.0}, r"dropout_p must be < 1.0, got 1.0"),
    "dropout-negative": ({"dropout_p": -0.1}, r"dropout_p must be >= 0.0, got -0.1"),
    "dropout-nan": ({"dropout_p": NAN}, "dropout_p must be finite, got nan"),
    "mask-dtype": ({"key_padding_mask": MASK.float()}, r"must be bool \(True = keep\), got torch.float32"),
    "mask-shape": ({"key_padding_mask": MASK.t()}, r"must be \(batch, seqlen\) = \(2, 4\), got \(4, 2\)"),
    "mask-device": ({"key_padding_mask": MASK.to(META)}, "must be on w's device cpu, got meta"),
    "mask-packed": ({**packing(0, 2, 6), "key_padding_mask": MASK}, "key_padding_mask must be None with cu_seqlens"),
    "cu-dtype": (packing(0, 2, 6, dtype=torch.int64), r"cu_seqlens must be int32 .*, got torch.int64 \(3,\)"),
    "cu-rank": (packing((0, 2, 6)), r"must be int32 \(sequences \+ 1,\), of .* got torch.int32 \(1, 3\)"),
    "cu-empty": (packing(0), r"\(sequences \+ 1,\), of one sequence or more, got torch.int32 \(1,\)"),
    "cu-falls": (packing(0, 4, 2, 6), r"must rise within 0 to total = 6, got \[0, 4, 2, 6\]"),
    "cu-before": (packing(-1, 2, 5), r"must rise within 0 to total = 6, got \[-1, 2, 5\]"),
    "cu-beyond": (packing(0, 4, 8), r"must rise within 0 to total = 6, got \[0, 4, 8\]"),
    "cu-device": (
        {**packing(0, 6), "cu_seqlens": offsets((2, 4)).to(META)},
        "cu_seqlens must be on w's device cpu, got meta",
    ),
    "longest": (packing(0, 1, 6), "max_seqlen must be >= the longest sequence = 5, got 4"),
    "longest-negative": (packing(0, 2, 6, longest=-1), "max_seqlen must be >= 0, got -1"),
    "longest-beyond": (packing(0, 2, 6, longest=2**70), r"max_seqlen must be below 2\*\*63, got 11805"),
    "dropout-beyond": ({"dropout_p": 10**400}, "dropout_p must be finite, got an int beyond the largest"),
    "longest-alone": ({"max_seqlen": 4}, "max_seqlen must be None without cu_seqlens"),
}
SHARED_TYPES = {
    "list": ({"w": [1.0]}, r"w must be a Tensor \(batch, .*, got list"),
    "causal-int": ({"causal": 1}, "causal must be a bool, got int"),
    "causal-numpy": ({"causal": numpy.bool_(True)}, "causal must be a bool, got numpy.bool"),
    "dropout-bool": ({"dropout_p": True}, "dropout_p must be a number, got bool"),
    "dropout-tensor": ({"dropout_p": torch.tensor(0.1)}, "dropout_p must be a number, got a Tensor"),
    "mask-list": ({"key_padding_mask": [True]}, "key_padding_mask must be a Tensor, got list"),
    "cu-list": ({**packing(0, 6), "cu_seqlens": [0, 6]}, "cu_seqlens must be a Tensor, got list"),
    "longest-missing": (packing(0, 2, 6, longest=None), "max_seqlen must be an int with cu_seqlens, got None"),
    "longest-float": (packing(0, 2, 6, longest=4.0), "max_seqlen must be an int with cu_seqlens, got float"),
    "longest-bool": (packing(0, 2, 6, longest=True), "max_seqlen must be an int with cu_seqlens, got bool"),
    "longest-tensor": (
        packing(0, 2, 6, longest=torch.tensor(4)),
        "max_seqlen must be an int with cu_seqlens, got a Tensor",
    ),
}
MSSA = {
    "scale-nan": ({"scale": NAN}, "scale must be finite, got nan"),
    "scale-inf": ({"scale": -INF}, "scale must be finite, got -inf"),
    "scale-beyond": ({"scale": -(10**400)}, "scale must be finite, got an int beyond the largest float"),
    "scale-fraction": ({"scale": Fraction(10**400)}, "scale must be finite, got a Fraction beyond the"),
    "phi": ({"phi": "sigmoid"}, "phi must be one of softmax, threshold, relu, identity, got 'sigmoid'"),
    "phi-array": ({"phi": numpy.array(["softmax", "relu"])}, "phi must be one of softmax, threshold, relu"),
    "no-threshold": ({"phi": "threshold"}, "threshold must be given with phi='threshold', got None"),
    "threshold-nan": ({"phi": "threshold", "threshold": NAN}, "threshold must be finite, got nan"),
    "threshold-negative": ({"phi": "threshold", "threshold": -1.0}, r"threshold must be >= 0.0, got -1.0"),
    "threshold-extra": ({"threshold": 0.5}, "threshold must be None with phi='softmax', got 0.5"),
    "lse-relu": ({"phi": "relu", "return_lse": True}, "return_lse must be False with phi='relu', which has"),
}
MSSA_TYPES = {
    "scale-tensor": ({"scale": torch.tensor(0.1)}, "scale must be a number, got a Tensor"),
    "scale-bool": ({"scale": True}, "scale must be a number, got bool"),
    "scale-str": ({"scale": "0.1"}, "scale must be a number, got str"),
    "lse-int": ({"return_lse": 1}, "return_lse must be a bool, got int"),
    "cache-dict": ({"cache": {}, "causal": True}, "cache must be a SubspaceCache, got dict"),
}
TSSA = {
    "temp-shape": ({"temp": torch.ones(8)}, r"temp must be \(nheads,\) = \(3,\), got \(8,\)"),
    "temp-row": ({"temp": torch.ones(1, 3)}, r"temp must be \(nheads,\) = \(3,\), got \(1, 3\)"),
    "temp-integer": ({"temp": torch.ones(3).int()}, "temp must have a floating dtype, got torch.int32"),
    "temp-dtype": ({"temp": TEMP.double()}, "temp must be torch.float32 as w, or float32, got torch.float64"),
    "temp-device": ({"temp": TEMP.to(META)}, "temp must be on w's device cpu, got meta"),
    "bias-full": ({"denom_bias": torch.ones(3, 4)}, "denom_bias must be None with causal=False"),
    **{
        f"bias-{name}": ({"denom_bias": bias, "causal": True}, message)
        for name, bias, message in [
            ("short", torch.ones(3, 3), r"must cover the sequence, \(nheads, >= 4\), got \(3, 3\)"),
            ("heads", torch.ones(2, 4), r"must be \(nheads, >= seqlen\[, 1\]\) = \(3, >= 4\), got \(2, 4\)"),
            ("rank", torch.ones(3), r"must be \(nheads, >= seqlen\[, 1\]\) = \(3, >= 4\), got \(3,\)"),
            ("wide", torch.ones(3, 4, 2), r"must be .* = \(3, >= 4\), got \(3, 4, 2\)"),
            ("dtype", torch.ones(3, 4).half(), "must be torch.float32 as w, or float32, got torch.float16"),
            ("device", torch.ones(3, 4, device=META), "must be on w's device cpu, got meta"),
        ]
    },
    "bias-packed": (
        {**packing(0, 2, 6), "denom_bias": torch.ones(3, 3), "causal": True},
        r"denom_bias must cover the sequence, \(nheads, >= 4\), got \(3, 3\)",
    ),
}
TSSA_TYPES = {
    "temp-list": ({"temp": [1.0]}, r"temp must be a Tensor \(nheads,\), got list"),
    "membership-int": ({"return_membership": 1}, "return_membership must be a bool, got int"),
    "cache-dict": ({"cache": {}, "causal": True}, "cache must be a TokenStatsCache, got dict"),
    "bias-list": ({"denom_bias": [0.0], "causal": True}, r"must be a Tensor \(nheads, >= seqlen\), got list"),
}
SPARSE = {
    "x-integer": ({"x": X.long()}, "x must have a floating dtype, got torch.int64"),
    "x-scalar": ({"x": torch.tensor(1.0)}, r"x must be \(..., dim\) with dim = 8, got \(\)"),
    "x-dim": ({"x": X[:, :6]}, r"x must be \(..., dim\) with dim = 8, got \(5, 6\)"),
    "weight-rank": ({"weight": WEIGHT[0]}, r"weight must be \(dim, (dim|hidden)\), got \(8,\)"),
    "weight-dtype": ({"weight": WEIGHT.double()}, "weight must be torch.float32 as x, or float32 beside half"),
    "weight-half": ({"weight": WEIGHT.half()}, "weight must be torch.float32 as x, .* got torch.float16"),
    "weight-device": ({"weight": WEIGHT.to(META)}, "weight must be on x's device cpu, got meta"),
    "step-huge": ({"step_size": 1e39}, "step_size must be < 3.4028[0-9]*e.38, got 1e.39"),
    "step-beyond": ({"step_size": 10**400}, "step_size must be finite, got an int beyond the largest"),
    "lambd-beyond": ({"lambd": 10**400}, "lambd must be finite, got an int beyond the largest float"),
    "step-nan": ({"step_size": NAN}, "step_size must be finite, got nan"),
    "step-negative": ({"step_size": -0.1}, r"step_size must be >= 0.0, got -0.1"),
    "step-tensor": ({"step_size": torch.tensor(1)}, "step_size must have a floating dtype, got"),
    "lambd-inf": ({"lambd": INF}, "lambd must be finite, got inf"),
    "lambd-negative": ({"lambd": -1}, r"lambd must be >= 0.0, got -1.0"),
}
SPARSE_TYPES = {
    "x-list": ({"x": [1.0]}, r"x must be a Tensor \(..., dim\), got list"),
    "lambd-bool": ({"lambd": True}, "lambd must be a number, got bool"),
}
ISTA = {"weight-square": ({"weight": DICTIONARY}, r"weight must be \(dim, dim\), got \(8, 12\)")}
ISTA_TYPES = {"nonnegative": ({"nonnegative": 0}, "nonnegative must be a bool, got int")}
OVERCOMPLETE = {
    "steps-zero": ({"steps": 0}, "steps must be >= 1, got 0"),
    "steps-beyond": ({"steps": 2**63}, r"steps must be below 2\*\*63, got 9223372036854775808"),
    "decoder-shape": ({"decoder": DICTIONARY.t()}, r"must be weight's shape = \(8, 12\), got \(12, 8\)"),
    "decoder-dtype": ({"decoder": DICTIONARY.half()}, "must be torch.float32 as weight, got torch.float16"),
    "decoder-device": ({"decoder": DICTIONARY.to(META)}, "decoder must be on x's device cpu, got meta"),
}
OVERCOMPLETE_TYPES = {
    "steps-float": ({"steps": 2.0}, "steps must be an int, got float"),
    "steps-bool": ({"steps": True}, "steps must be an int, got bool"),
    "decoder-list": ({"decoder": [1.0]}, r"decoder must be a Tensor \(dim, hidden\), got list"),
}
BACKEND = {
    "backend-unknown": (
        {"backend": "cuda"},
        "backend must be None or one of triton, cpp, composite, reference.*, got 'cuda'",
    )
}
BACKEND_TYPES = {"backend-type": ({"backend": 1}, "backend must be None or a string, got int")}
TABLES = [
    *((BOTH, ValueError, SHARED), (BOTH, TypeError, SHARED_TYPES)),
    *((("mssa",), ValueError, MSSA), (("mssa",), TypeError, MSSA_TYPES)),
    *((("tssa",), ValueError, TSSA), (("tssa",), TypeError, TSSA_TYPES)),
    *((ALL[2:], ValueError, SPARSE), (ALL[2:], TypeError, SPARSE_TYPES)),
    *((("ista",), ValueError, ISTA), (("ista",), TypeError, ISTA_TYPES)),
    *((ALL[3:], ValueError, OVERCOMPLETE), (ALL[3:], TypeError, OVERCOMPLETE_TYPES)),
    *((ALL, ValueError, BACKEND), (ALL, TypeError, BACKEND_TYPES)),
]
CASES = [
    pytest.param(op, changes, kind, message, id=f"{op}-{name}")
    for ops, kind, table in TABLES
    for op in ops
    for name, (changes, message) in table.items()
]
GOOD = {
    "mssa": {"w": W},
    "tssa": {"w": W, "temp": TEMP},
    "ista": {"x": X, "weight": WEIGHT},
    "ista_overcomplete": {"x": X, "weight": DICTIONARY},
}


def package(op):
    return op.removesuffix("_overcomplete")


def call(op, **changes):
    return getattr(crate_kernels, op)(**{**GOOD[op], **changes})


@pytest.mark.parametrize("op", ALL)
def test_the_input_that_the_errors_start_from_is_good(op):
    assert call(op).isfinite().all()


@pytest.mark.parametrize(("op", "changes", "kind", "message"), CASES)
def test_bad_input_is_refused(op, changes, kind, message):
    with pytest.raises(kind, match=f"^{op}: .*{message}"):
        call(op, **changes)


@pytest.mark.parametrize("op", ["mssa", "tssa", "ista"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=["strided", "jagged"])
def test_nested_tensors_are_refused_with_advice(op, layout):
    nested = torch.nested.nested_tensor([randn(2, 8), randn(3, 8)], layout=layout)
    name = next(iter(GOOD[op]))
    with pytest.raises(
        NotImplementedError, match=f"^{op}: {name} must not be a nested tensor; pack it with cu_seqlens"
    ):
        call(op, **{name: nested})


OTHERS = {
    "mask": ({}, "key_padding_mask", MASK),
    "offsets": ({**packing(0, 2, 6)}, "cu_seqlens", offsets((2, 4))),
    "bias": ({"causal": True}, "denom_bias", torch.zeros(3, 4)),
    "decoder": ({}, "decoder", DICTIONARY),
}
TENSORS = [(op, {}, name, t) for op in ALL for name, t in GOOD[op].items()]
TENSORS += [(op, *OTHERS[name]) for op in BOTH for name in ("mask", "offsets")]
TENSORS += [("tssa", *OTHERS["bias"]), ("ista_overcomplete", *OTHERS["decoder"])]
TENSORS = pytest.mark.parametrize(
    ("op", "options", "name", "tensor"), [pytest.param(*case, id=f"{case[0]}-{case[2]}") for case in TENSORS]
)


@TENSORS
def test_tensors_without_strides_are_refused_by_name(op, options, name, tensor):
    layouts = {"torch.sparse_coo": tensor.to_sparse()}
    if tensor.dtype == torch.float32:
        layouts["torch._mkldnn"] = tensor.to_mkldnn()
    for layout, other in layouts.items():
        with pytest.raises(ValueError, match=f"^{op}: {name} must be a dense tensor, got one of layout {layout}$"):
            call(op, **{**options, name: other})


@TENSORS
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
def test_tensors_of_8_bits_are_refused_by_name(op, options, name, tensor, dtype):
    with pytest.raises(ValueError, match=f"^{op}: {name} must .*, got {dtype}"):
        call(op, **{**options, name: tensor.to(dtype)})


@pytest.mark.parametrize("op", ALL)
@pytest.mark.parametrize(
    ("kernel", "reason"), [(True, "it is at home (fetch it)"), (False, "fake has no {op} kernel yet")]
)
def test_an_unavailable_backend_says_why(op, kernel, reason, monkeypatch):
    missing = "it is at home (fetch it)" if kernel else None
    fake = backends.Backend("fake", "crate_kernels.ops.{op}.composite", missing=missing)
    monkeypatch.setitem(backends._BACKENDS, "fake", fake)
    monkeypatch.setitem(backends._has_kernel, (package(op), "fake"), kernel)
    reason = re.escape(reason.format(op=package(op)))
    message = f"^{op}: backend='fake' is unavailable: {reason}; use backend='composite'"
    with pytest.raises(RuntimeError, match=message):
        call(op, backend="fake")


NOT_IN_KERNELS = {
    "relu": ({"phi": "relu"}, 4, "phi='relu'"),
    "identity": ({"phi": "identity"}, 4, "phi='identity'"),
    "wide-heads": ({}, 257, "head_dim > 256, got 257"),
    "no-channels": ({}, 0, "head_dim = 0"),
    "no-channels-causal": ({"causal": True, "return_lse": True}, 0, "head_dim = 0"),
}


@pytest.mark.parametrize(("options", "head_dim", "what"), NOT_IN_KERNELS.values(), ids=NOT_IN_KERNELS)
def test_what_a_kernel_does_not_have_is_refused_and_never_chosen(options, head_dim, what, monkeypatch):
    kernel = backends.Backend("fake", "crate_kernels.ops.{op}.composite", devices=("cpu",), dtypes=(torch.float32,))
    monkeypatch.setitem(backends._BACKENDS, "fake", kernel)
    monkeypatch.setitem(backends._has_kernel, ("mssa", "fake"), True)
    w = torch.randn(1, 2, 5, head_dim)
    with pytest.raises(
        NotImplementedError, match=f"^mssa: backend='fake' does not have {re.escape(what)}; use backend='comp"
    ):
        crate_kernels.mssa(w, backend="fake", **options)
    monkeypatch.setattr(backends, "_PREFERENCE", {"cpu": ("fake",)})
    assert backends.resolve("mssa", None, w.device, w.dtype) == "fake"
    torch.testing.assert_close(
        crate_kernels.mssa(w, **options), crate_kernels.mssa(w, backend="composite", **options), rtol=0, atol=0
    )


def test_offsets_are_checked_by_value_on_request():
    crate_kernels.testing.check_cu_seqlens(offsets((2, 4)), 6, 4)
    with pytest.raises(
        ValueError, match=r"^check_cu_seqlens: cu_seqlens must rise within 0 to total = 6, got \[0, 8\]"
    ):
        crate_kernels.testing.check_cu_seqlens(offsets((8,)), 6, 8)
    with pytest.raises(ValueError, match=r"^check_cu_seqlens: max_seqlen must be >= the longest sequence = 4, got 3"):
        crate_kernels.testing.check_cu_seqlens(offsets((2, 4)), 6, 3)


def test_offsets_out_of_range_are_clamped_where_reading_them_is_not_free(monkeypatch):
    expected = call("tssa", **packing(0, 2, 6))
    monkeypatch.setattr(checks, "_readable", lambda tensor: None)
    torch.testing.assert_close(call("tssa", **packing(0, 2, 9)), expected)
    torch.testing.assert_close(call("tssa", **packing(-3, 2, 6)), expected)
    # Rows outside every sequence get zero, and so do rows beyond max_seqlen where sequences are padded.
    assert not call("tssa", **packing(0, 2, 5))[5:].any()
    assert not call("tssa", backend="composite", **packing(0, 6))[4:].any()
    assert call("tssa", **packing(0, 6)).isfinite().all()
    assert call("tssa", **packing(0, 4, 2, 6)).isfinite().all()


def test_traced_offsets_out_of_range_leave_no_row_unwritten():
    """Composite's mssa pads where it cannot read the offsets, and a place in the padding attends like any other."""

    def packed(cu_seqlens):
        return call("mssa", w=PACKED, cu_seqlens=cu_seqlens, max_seqlen=4, return_lse=True, backend="composite")

    out, lse = torch.compile(packed, fullgraph=True, backend="aot_eager")(offsets((2, 3)))
    expected, expected_lse = call("mssa", **{**packing(0, 2, 5), "w": PACKED[:5]}, return_lse=True)
    torch.testing.assert_close((out[:5], lse[:, :5]), (expected, expected_lse))
    assert not out[5:].any()
    assert not lse[:, 5:].any()
