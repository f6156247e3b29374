"""Packed calls that a plan repeats: the values of their offsets are checked each time, and decide what is computed."""

from functools import partial

import pytest
import torch

import crate_kernels as ck
from crate_kernels._core import backends, plan
from tests.ops.common import randn
from tests.ops.repeated import NEEDS_PLANS, both, hits, repeated_calls  # noqa: F401

pytestmark = NEEDS_PLANS
TOTAL, LONGEST = 9, 5
FORMS = {
    "mssa": ck.mssa,
    "tssa": lambda w, **options: ck.tssa(w, torch.ones(2), **options),
    "tssa-causal": lambda w, **options: ck.tssa(w, torch.ones(2), causal=True, **options),
}
each = pytest.mark.parametrize("function", FORMS.values(), ids=FORMS)


def offsets(*values):
    return torch.tensor(values, dtype=torch.int32)


def packed(function, *values, **options):
    return partial(function, cu_seqlens=offsets(*values), max_seqlen=LONGEST, **options)


def tokens(seed=0):
    return (randn(TOTAL, 2, 16, seed=seed, dtype=torch.float32),)


def known(function):
    """Make a packed call three times, with a gradient and without."""
    for seed in range(3):
        both(packed(function, 0, 4, 9, backend="cpp"), tokens(seed))
        with torch.no_grad():
            packed(function, 0, 4, 9, backend="cpp")(*tokens(seed))


@pytest.mark.parametrize("values", [(0, 4, 9), (0, 5, 9), (1, 4, 8), (0, 0, 0), (2, 2, 7)], ids=str)
@each
def test_offsets_of_a_repeated_call_are_its_own(function, values):
    known(function)
    found, actual = hits(lambda: both(packed(function, *values, backend="cpp"), tokens(3)))
    assert found == 2
    expected = both(packed(function, *values, backend="reference"), tokens(3))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


WRONG = {
    "beyond": ((0, 5, 10), r"rise within 0 to total = 9, got \[0, 5, 10\]"),
    "negative": ((-1, 4, 9), "rise within 0"),
    "falling": ((0, 5, 4), "rise within 0"),
    "falling-inside": ((4, 0, 5), "rise within 0"),
    "longer": ((0, 6, 9), "max_seqlen must be >= the longest sequence = 6"),
}


@pytest.mark.parametrize("wanted", [True, False], ids=["grad", "no-grad"])
@pytest.mark.parametrize(("values", "message"), WRONG.values(), ids=WRONG)
@each
def test_offsets_of_wrong_values_are_refused_on_a_repeated_call(function, values, message, wanted):
    known(function)
    (w,) = tokens()
    with torch.set_grad_enabled(wanted), pytest.raises(ValueError, match=message):
        packed(function, *values, backend="cpp")(w.requires_grad_(wanted))


KINDS = {
    "int64": (lambda t: t.long(), ValueError, "must be int32"),
    "two-dimensions": (lambda t: t[None], ValueError, "must be int32"),
    "list": (torch.Tensor.tolist, TypeError, "cu_seqlens must be a Tensor"),
    "elsewhere": (lambda t: t.to("meta"), ValueError, "cu_seqlens must be on w's device"),
    "freed": (lambda t: (t.untyped_storage().resize_(0), t)[1], ValueError, "was freed or cut"),
    "empty": (lambda t: t[:0], ValueError, "must be int32"),
    "one": (lambda t: t[:1], ValueError, "must be int32"),
    "sparse": (lambda t: t.to_sparse(), ValueError, "must be a dense tensor"),
    "nested": (lambda t: torch.nested.nested_tensor([t, t]), NotImplementedError, "must not be a nested tensor"),
    "quantised": (lambda t: torch.quantize_per_tensor(t.float(), 1.0, 0, torch.qint32), ValueError, "must be int32"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(("change", "error", "message"), KINDS.values(), ids=KINDS)
@each
def test_offsets_of_another_kind_are_refused_on_a_repeated_call(function, change, error, message):
    known(function)
    with pytest.raises(error, match=message):
        function(*tokens(), cu_seqlens=change(offsets(0, 4, 9)), max_seqlen=LONGEST, backend="cpp")


LENGTHS = {"text": "5", "bool": True, "number": 5.0, "none": None, "tensor": torch.tensor(5)}


@pytest.mark.parametrize("value", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("bias", [None, torch.ones(2, 6)], ids=["plain", "bias"])
@each
def test_a_length_of_a_wrong_type_is_refused_on_a_repeated_call(function, bias, value):
    more = {} if function is not FORMS["tssa-causal"] else {"denom_bias": bias}
    options = {"cu_seqlens": offsets(0, 4, 9), "backend": "cpp", **more}
    for seed in range(3):
        function(*tokens(seed), max_seqlen=LONGEST, **options)
    with pytest.raises(TypeError, match="max_seqlen must be an int with cu_seqlens"):
        function(*tokens(), max_seqlen=value, **options)


@each
def test_offsets_that_lie_apart_repeat_as_another_kind(function):
    known(function)
    apart = torch.stack((offsets(0, 3, 8), offsets(7, -5, 99)), 1)[:, 0]
    expected = packed(function, 0, 3, 8, backend="reference")(*tokens(4))
    for _ in range(4):
        found = function(*tokens(4), cu_seqlens=apart, max_seqlen=LONGEST, backend="cpp")
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@each
def test_offsets_changed_before_the_backward_are_refused_on_a_repeated_call(function):
    known(function)
    bounds, (w,) = offsets(0, 4, 9), tokens()
    found, out = hits(lambda: function(w.requires_grad_(), cu_seqlens=bounds, max_seqlen=LONGEST, backend="cpp").sum())
    bounds.add_(1)
    assert found == 1
    with pytest.raises(RuntimeError, match="changed in place"):
        out.backward()


@each
def test_a_repeated_packed_call_chooses_no_backend_again(function, monkeypatch):
    known(function)
    monkeypatch.setattr(backends, "resolve", None)
    monkeypatch.setattr(plan.Planned, "__call__", None)
    assert hits(lambda: both(packed(function, 0, 4, 9, backend="cpp"), tokens()))[0] == 2
