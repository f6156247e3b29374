"""Token statistics in the C++ extension: levels, tails, strides, threads."""

from collections import Counter

import pytest
import torch

from crate_kernels import testing, tssa
from crate_kernels._core import operator
from crate_kernels._native import extension
from crate_kernels.ops.tssa import op
from crate_kernels.ops.tssa.call import TSSACall
from tests.ops.common import FORMS, LEVELS, NANS, NEEDS_EXTENSION, STRIDES, expected, failures, measured, offsets, randn

pytestmark = NEEDS_EXTENSION

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def named(name, shape, causal, **kwargs):
    options = {"causal": causal, "return_membership": True, **kwargs.pop("options", {})}
    return testing.Case("tssa", name, shape, options, **kwargs)


def assert_together_within_tolerance(cases, dtype):
    """Compare the sum of errors with the sum of tolerances: eager's error in dtemp's few numbers may be luck."""
    errors, tolerances = Counter(), Counter()
    for case in cases:
        for m in measured(case, dtype, "cpp", "cpu", *expected(case, dtype)):
            assert m.finite, (str(case), m)
            errors[m.output] += m.error
            tolerances[m.output] += m.tolerance
    assert [(name, error, tolerances[name]) for name, error in errors.items() if error > tolerances[name]] == []


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", LEVELS)
def test_every_level_is_within_tolerance(name, dtype, level):
    level(name)
    assert [(str(case), m) for case in testing.cases("tssa") for m in failures(case, dtype)] == []


@pytest.mark.exhaustive
@FORMS
@pytest.mark.parametrize("name", LEVELS)
def test_every_tail_of_tokens(name, causal, level):
    level(name)
    lengths = (*range(1, 34), *range(60, 82), 127, 128, 129)
    for dtype in (torch.float32, torch.bfloat16):
        assert_together_within_tolerance([named(f"n{n}", (1, 3, n, 16), causal) for n in lengths], dtype)


@FORMS
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_head_dim(dtype, causal):
    dims = (1, 2, 3, 7, 15, 17, 31, 33, 49, 65, 72, 127, 255, 256, 257, 520)
    assert_together_within_tolerance([named(f"d{d}", (1, 2, 37, d), causal) for d in dims], dtype)


@FORMS
@pytest.mark.parametrize("name", LEVELS)
def test_every_group_of_vectors(name, causal, level):
    """Head dims of whole vectors, read in place by groups of 1 to 4 vectors."""
    level(name)
    for dtype in (torch.float32, torch.bfloat16):
        cases = [named(f"d{d}", (1, 2, 37, d), causal) for d in (8, 16, 24, 32, 40, 96, 112)]
        assert_together_within_tolerance(cases, dtype)


@pytest.mark.parametrize("padding", ["left", "scattered"])
def test_padding_before_the_first_key(padding):
    """In the full form a padded token sees keys that come after it."""
    assert failures(named("late-key", (3, 3, 65, 16), False, padding=padding), torch.float32) == []


SPLITS = {
    "full": (False, {}),
    "causal": (True, {}),
    "dropout": (False, {"options": {"dropout_p": 0.3}}),
    "causal-dropout": (True, {"options": {"dropout_p": 0.3}}),
    "row": (False, {"padding": "row"}),
    "causal-scattered": (True, {"padding": "scattered"}),
    "causal-left": (True, {"padding": "left"}),
    "packed": (False, {"lengths": (150, 0, 3, 200)}),
    "causal-packed": (True, {"lengths": (150, 0, 3, 200)}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("causal", "how"), SPLITS.values(), ids=SPLITS)
def test_no_bit_depends_on_the_number_of_threads(causal, how, dtype, threads):
    """One thread goes through a sequence; several share it."""
    case = named("threads", (2, 3, 300, 32), causal, **how)
    inputs, results = testing.make_inputs(case, dtype), []
    for count in (2, 5, 9, 1):
        threads(count)
        results.append(testing.run(case, inputs, "cpp"))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)
    assert [m for m in testing.measure(results[0], *expected(case, dtype), dtype) if not m.passed] == []


@FORMS
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("lay_out", STRIDES.values(), ids=STRIDES)
def test_strides_change_no_bit(lay_out, dtype, causal):
    w, dout = (lay_out(randn(2, 3, 70, 32, dtype=dtype, seed=seed)) for seed in (0, 1))
    temp = torch.tensor([0.8, 1.0, 1.3])

    def run(w, dout):
        w = w.detach().requires_grad_()
        out, membership = tssa(w, temp, causal=causal, return_membership=True, backend="cpp")
        return out.detach(), membership.detach(), *torch.autograd.grad((out * dout).sum() + membership[0].sum(), w)

    torch.testing.assert_close(run(w, dout), run(w.contiguous(), dout.contiguous()), rtol=0, atol=0)


@FORMS
@pytest.mark.parametrize("head_dim", [64, 20], ids=["vectors", "rows"])
@pytest.mark.parametrize("name", LEVELS)
def test_bf16_is_fp32_rounded_to_even(name, head_dim, causal, level):
    """Tokens are converted exactly, and results once; in so many there are numbers half-way between two of bf16."""
    level(name)
    w, temp = randn(8, 6, 600, head_dim, dtype=torch.bfloat16), torch.ones(6)
    out = tssa(w.float(), temp, causal=causal, backend="cpp")
    assert (out.view(torch.int32) & 0xFFFF == 0x8000).any()
    torch.testing.assert_close(tssa(w, temp, causal=causal, backend="cpp"), out.bfloat16(), rtol=0, atol=0)


@FORMS
@pytest.mark.parametrize("name", LEVELS)
def test_a_head_may_be_off(name, causal, level):
    """An infinite logit is as one that is far below the others: exp2 of every level is 0."""
    level(name)
    w, results = randn(1, 3, 37, 16, dtype=torch.float32), []
    for far in (-1e4, -torch.inf):
        temp, bias = torch.tensor([0.8, 1.0 if causal else far, 1.3]), torch.zeros(3, 37)
        bias[1] = far
        options = {"causal": True, "denom_bias": bias} if causal else {}
        results.append(tssa(w, temp, **options, return_membership=True, backend="cpp"))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    assert not results[1][1][:, 1].any()


@FORMS
@pytest.mark.parametrize("shape", [(2, 0, 5, 8), (2, 0, 5, 0), (2, 3, 5, 0)], ids=["heads", "both", "channels"])
def test_there_may_be_no_heads_and_no_channels(shape, causal):
    w, temp = torch.zeros(shape, requires_grad=True), torch.ones(shape[1], requires_grad=True)
    out, membership = tssa(w, temp, causal=causal, return_membership=True, backend="cpp")
    gradients = torch.autograd.grad(out.sum() + membership.square().sum(), (w, temp))
    assert out.shape == shape
    assert torch.equal(membership, torch.full_like(membership, 1 / 3))
    assert not any(gradient.any() for gradient in gradients)


@FORMS
@pytest.mark.parametrize("bits", NANS.values(), ids=NANS)
@pytest.mark.parametrize("name", LEVELS)
def test_not_a_number_stays_one(name, bits, causal, level):
    level(name)
    w = randn(1, 3, 40, 16, dtype=torch.float32)
    w.view(torch.int32)[0, 1, 20, 3] = bits
    out, membership = tssa(w, torch.ones(3), causal=causal, return_membership=True, backend="cpp")
    assert membership[:, :, 20:].isnan().all()
    assert out[:, :, 20:].isnan().all()
    assert out[:, :, :20].isfinite().all() == causal


def test_a_bias_of_packed_sequences_covers_the_longest():
    """A kernel would take the last place of a shorter one for the tokens behind it."""
    w, temp, short = randn(9, 3, 16, dtype=torch.float32), torch.ones(3), torch.zeros(3, 4)
    packed = TSSACall(cu_seqlens=offsets((4, 5)), max_seqlen=5)
    match = r"denom_bias must be float32 \(3, 5\) on cpu, got float32 \(3, 4\) on cpu"
    with pytest.raises(RuntimeError, match=f"^tssa: {match}"):
        op.tssa_causal_fwd(w, temp, short, *packed, "cpp")
    with pytest.raises(RuntimeError, match=f"^tssa backward: {match}"):
        op.tssa_causal_bwd(w, None, w, temp, short, w.new_ones(3, 9), packed.empty_sums(w), *packed, "cpp")
    packed = packed._replace(max_seqlen=4)  # of which the values are the caller's business
    assert op.tssa_causal_fwd(w, temp, short, *packed, "cpp")[0].isfinite().all()


@pytest.mark.parametrize("name", ["tssa_fwd", "tssa_bwd"])
def test_the_extension_takes_the_options_of_a_call(name):
    """C++ lists them once more, in csrc/tssa/call.h: with the same names, types and order."""
    schema = str(getattr(extension.library(), name)._schema)
    assert operator.schema_of(TSSACall).replace("SymInt", "int") in schema
