"""The C++ extension's own promises: levels, strides, row tails, symbols."""

import itertools
import math
import shutil
import subprocess

import pytest
import torch

from crate_kernels import mssa, testing
from crate_kernels._core import operator, products
from crate_kernels._native import extension, libraries
from crate_kernels.bench import providers
from crate_kernels.bench.gate import Gate
from crate_kernels.ops.mssa import rectangular
from crate_kernels.ops.mssa.call import DecodeCall, MSSACall
from tests.ops.common import FORMS, LEVELS, NANS, NEEDS_EXTENSION, STRIDES, failures, randn

pytestmark = NEEDS_EXTENSION

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def test_build_info_names_the_sources_and_levels():
    info = extension.build_info()
    assert info["sources"] == libraries.source_hash(libraries.source_folder())
    assert info["torch_abi"] == libraries.TORCH_TARGET
    assert info["cpu_capabilities"].split()[0] == "portable"
    assert extension.cpu_capability() in info["cpu_capabilities"].split()


OPS = {
    "mssa_fwd": MSSACall,
    "mssa_bwd": MSSACall,
    "mssa_decode": DecodeCall,
    "mssa_rectangular_fwd": rectangular.RectangularCall,
    "mssa_rectangular_bwd": rectangular.RectangularCall,
}


@pytest.mark.parametrize("name", OPS)
def test_the_options_of_an_op_are_the_fields_of_the_record(name):
    extension.load()
    schema = str(getattr(torch.ops.crate_kernels_C, name).default._schema)
    assert operator.schema_of(OPS[name]).replace("SymInt", "int") in schema


def test_an_unknown_level_is_refused():
    with pytest.raises(RuntimeError, match=r"capability must be one that this machine has, up to .*, got sse9"):
        extension.set_cpu_capability("sse9")


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", LEVELS)
def test_every_level_is_within_tolerance(name, dtype, level):
    level(name)
    wrong = [
        (str(case), m)
        for case in testing.cases("mssa")
        if case.options.get("phi") not in ("relu", "identity")
        for m in failures(case, dtype)
    ]
    assert wrong == []


@pytest.mark.parametrize("bits", NANS.values(), ids=NANS)
@pytest.mark.parametrize("name", LEVELS)
def test_not_a_number_stays_one(name, bits, level):
    level(name)
    w, g = (randn(1, 2, 70, 16).float() for _ in range(2))
    w.view(torch.int32)[0, 0, 40] = bits
    for options in ({}, {"causal": True}, {"causal": True, "phi": "threshold", "threshold": 0.6}):
        found = {}
        for backend in ("reference", "cpp"):
            leaf = w.clone().requires_grad_()
            out, lse = mssa(leaf, return_lse=True, backend=backend, **options)
            found[backend] = [t.isnan() for t in (out, lse, *torch.autograd.grad(out, leaf, g))]
        for one, other in zip(*found.values(), strict=True):
            assert torch.equal(one, other)


@FORMS
@pytest.mark.parametrize("name", LEVELS)
def test_every_row_tail(name, causal, level):
    level(name)
    for seqlen in (*range(1, 18), *range(58, 84), 127, 128, 129):
        for dtype in (torch.float32, torch.bfloat16):
            case = testing.Case("mssa", f"tail-{seqlen}", (1, 1, seqlen, 24), {"causal": causal, "return_lse": True})
            assert failures(case, dtype) == [], (seqlen, dtype)


@pytest.mark.parametrize("name", LEVELS)
def test_lse_is_rounded_once(name, level):
    """Tokens of zeros weigh the same: lse is the logarithm of their number."""
    level(name)
    for seqlen in range(1, 300):
        _, lse = mssa(torch.zeros(1, 1, seqlen, 16), return_lse=True, backend="cpp")
        exact = torch.full((1, 1, seqlen), seqlen, dtype=torch.float64).log()
        assert torch.equal(lse, exact.float()), seqlen


@pytest.mark.parametrize("name", LEVELS)
def test_a_subnormal_result_is_rounded_to_nearest(name, level):
    """The instruction that rounds to bf16 takes subnormals for 0."""
    level(name)
    w = torch.zeros(1, 1, 4, 16, dtype=torch.bfloat16)
    w[:, :, ::2] = torch.finfo(torch.bfloat16).tiny
    assert torch.equal(mssa(w, backend="cpp"), torch.full_like(w, torch.finfo(torch.bfloat16).tiny / 2))


def test_bf16_is_multiplied_as_the_processor_does_it_best(level):
    """AVX512-BF16 without AMX is an Intel processor's last choice, and an AMD's first."""
    w = randn(1, 2, 70, 32, dtype=torch.bfloat16)
    own, best = mssa(w, backend="cpp"), extension.cpu_capability()
    slow = best == "avx512_bf16" and products._is_made_by("GenuineIntel")
    level("avx512" if slow else best)
    assert torch.equal(mssa(w, backend="cpp"), own)
    if best == "avx512_bf16":
        level("avx512_bf16" if slow else "avx512")
        assert not torch.equal(mssa(w, backend="cpp"), own)


@pytest.mark.parametrize("head_dim", [1, 2, 3, 7, 15, 17, 31, 33, 47, 49, 63, 65, 72, 96, 127, 129, 191, 255, 256])
def test_every_head_dim(head_dim):
    for dtype in DTYPES.values():
        case = testing.Case("mssa", f"dim-{head_dim}", (1, 2, 37, head_dim), {"return_lse": True})
        assert failures(case, dtype) == [], dtype


@pytest.mark.parametrize("seqlen", [5, 65])
def test_padding_holds_nothing_of_freed_memory(seqlen):
    """Scratch memory may hold NaN, and zero times NaN is NaN."""
    case = testing.Case("mssa", "after-nan", (1, 2, seqlen, 24), {"return_lse": True})
    for dtype in DTYPES.values():
        inputs = testing.make_inputs(case, dtype)
        for size in range(8, 18):
            torch.full((1 << size,), torch.nan)
            assert all(t.isfinite().all() for t in testing.run(case, inputs, "cpp").values()), (dtype, size)


@pytest.mark.exhaustive  # the oracle takes half a minute
def test_error_does_not_grow_with_the_number_of_tokens(threads):
    threads(2)  # a head each: the pair form
    case = testing.Case("mssa", "many-tokens", (1, 2, 8192, 16))
    function = next(p for p in providers.of("mssa") if p.name == "cpp").make(case)
    verdict = Gate(case, torch.float32, torch.device("cpu")).check(function, gradients=True)
    assert verdict.passed, verdict


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("lay_out", STRIDES.values(), ids=STRIDES)
def test_strides_change_no_bit(lay_out, dtype):
    w = lay_out(randn(2, 3, 70, 20, dtype=dtype))
    dout = lay_out(randn(2, 3, 70, 20, dtype=dtype, seed=1))

    def run(w, dout):
        w = w.detach().requires_grad_()
        out, lse = mssa(w, return_lse=True, backend="cpp")
        (dw,) = torch.autograd.grad(out, w, dout)
        return out.detach(), lse.detach(), dw

    torch.testing.assert_close(run(w, dout), run(w.contiguous(), dout.contiguous()), rtol=0, atol=0)


@FORMS
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("magnitude", [0.0, 3.0, 8.0, 100.0])
def test_scores_of_every_size(magnitude, dtype, causal):
    """Large ones leave the form without maxima, and in the backward the lse is no longer exact enough."""
    case = testing.Case("mssa", "size", (1, 2, 90, 16), {"causal": causal, "return_lse": True}, magnitude=magnitude)
    assert failures(case, dtype) == []


THRESHOLD = {"phi": "threshold", "threshold": 0.9, "return_lse": True}


@pytest.mark.parametrize(
    ("shape", "options", "magnitude", "dtype"),
    [
        ((1, 2, 65, 16), {"causal": True}, 10.0, torch.float16),
        ((2, 4, 20, 16), {"causal": True}, 10.0, torch.float16),
        ((1, 1, 72, 63), THRESHOLD, 2.0, torch.float32),
        ((2, 4, 40, 48), THRESHOLD, 3.0, torch.float32),
    ],
    ids=["rounded-out", "rounded-out-short", "threshold-lse", "threshold-lse-heads"],
)
def test_gradients_of_saturated_rows(shape, options, magnitude, dtype):
    """Neither an output in fp16 nor a large lse is exact enough to take the gradient's terms from."""
    assert failures(testing.Case("mssa", "saturated", shape, options, magnitude=magnitude), dtype) == []


def selected(w, threshold, **options):
    """Return which weights a forward selects, and which its backward does, as matrices of queries and keys.

    The last ``seqlen`` channels of ``w`` tell the tokens apart.
    """
    seqlen, leaf = w.shape[2], w.clone().requires_grad_()
    out = mssa(leaf, phi="threshold", threshold=threshold, backend="cpp", **options)
    dout = torch.zeros_like(w)
    dout[..., -seqlen:] = torch.eye(seqlen)
    (dw,) = torch.autograd.grad(out, leaf, dout)
    return out[..., -seqlen:] != 0, dw[..., -seqlen:].mT != 0


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"scale": -0.3}], ids=["full", "causal", "negative-scale"])
@pytest.mark.parametrize("magnitude", [0.5, 2.0, 6.0])
@pytest.mark.parametrize("name", LEVELS)
def test_a_backward_selects_what_its_forward_did(name, magnitude, options, level):
    """Each threshold is a probability: lse, which is rounded, would say by chance whether it is above itself."""
    level(name)
    for seed in range(40):
        w = magnitude * randn(1, 1, 20, 40, seed=seed, dtype=torch.float32)
        w[..., -20:] = 0.25 * torch.eye(20)
        scores = options.get("scale", 40**-0.5) * (w @ w.mT)
        threshold = scores.softmax(-1)[0, 0, seed % 20, 7 * seed % 20].item()
        forward, backward = selected(w, threshold, **options)
        assert torch.equal(forward, backward), seed


@pytest.mark.parametrize("seqlen", [2, 4, 16])
@pytest.mark.parametrize("name", LEVELS)
def test_equal_tokens_are_not_above_their_share(seqlen, name, level):
    """Neither in the forward nor in the backward, whatever their score is rounded to."""
    level(name)
    for value in torch.linspace(0.05, 0.75, 100).tolist():
        w = torch.full((1, 1, seqlen, 16), value, requires_grad=True)
        out = mssa(w, phi="threshold", threshold=1 / seqlen, backend="cpp")
        (dw,) = torch.autograd.grad(out.sum(), w)
        assert not out.any(), value
        assert not dw.any(), value


def test_a_tiny_threshold_is_compared_with_weights_that_have_not_underflowed():
    """A bound that shifts a row of small norm is far above its scores."""
    w = torch.tensor([[10.5, 0.0], [0.0, 5.0], [0.0, -6.0]])
    w = torch.cat([w, 0.1 * torch.eye(3)], -1)[None, None]
    forward, backward = selected(w, 1e-30, scale=1.0)
    chosen = (w @ w.mT).softmax(-1) > 1e-30
    assert torch.equal(forward, chosen)
    assert torch.equal(backward, chosen)


@FORMS
@pytest.mark.parametrize("padding", ["", "scattered"])
@pytest.mark.parametrize("height", [30.0, 62.0, 70.0, 85.0, 100.0])
def test_tokens_of_small_norm_beside_a_large_one(height, padding, causal):
    """Half the large one's score bounds those of every row, which must not be rounded to its precision."""
    case = testing.Case("mssa", "outlier", (2, 4, 48, 32), {"causal": causal, "return_lse": True}, padding=padding)
    inputs = testing.make_inputs(case, torch.float32)
    w = inputs.differentiable["w"].detach() * 0.3
    w[:, :, :1] *= (height * 2 * 32**0.5 * math.log(2) / w[:, :, :1].square().sum(-1, keepdim=True)).sqrt()
    inputs.differentiable["w"].data.copy_(w)
    eager, exact = (testing.run(case, one, "reference") for one in (inputs, inputs.to(torch.float64)))
    found = testing.measure(testing.run(case, inputs, "cpp"), eager, exact, torch.float32)
    assert [m for m in found if not m.passed] == []


@FORMS
@pytest.mark.parametrize("name", LEVELS)
def test_a_score_near_the_largest_number_of_a_short_head(name, causal, level):
    """In bits it would be infinite."""
    level(name)
    w = randn(1, 1, 9, 16, dtype=torch.float32)
    w[:, :, 4] = 0.0
    w[:, :, 4, 3] = 3e38**0.5
    leaf = w.requires_grad_()
    out, lse = mssa(leaf, scale=1.0, causal=causal, return_lse=True, backend="cpp")
    expected, expected_lse = mssa(leaf, scale=1.0, causal=causal, return_lse=True, backend="reference")
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    dout = randn(1, 1, 9, 16, dtype=torch.float32, seed=1)
    (dw,), (expected_dw,) = (torch.autograd.grad(o, leaf, dout) for o in (out, expected))
    assert torch.equal(dw.isfinite(), expected_dw.isfinite())


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", LEVELS)
def test_gradients_of_up_to_128_tokens_take_nothing_from_rounded_results(name, dtype, level):
    """Where a row's delta cancels, the rounding of out and of lse would show."""
    level(name)
    for seqlen, causal, padded in itertools.product((1, 5, 64, 65, 128), (False, True), (False, True)):
        w, dout = (randn(2, 3, seqlen, 24, dtype=dtype, seed=seed) for seed in (0, 1))
        mask = randn(2, seqlen, seed=2) > 0 if padded else None
        call = MSSACall(key_padding_mask=mask, causal=causal, scale=0.2)
        found = []
        for value in (0.0, torch.nan):
            dw, out = torch.empty_like(w), torch.full_like(w, value)
            torch.ops.crate_kernels_C.mssa_bwd(dout, None, w, out, torch.full((2, 3, seqlen), value), *call, dw)
            found.append(dw)
        assert torch.equal(*found), (seqlen, causal, padded)


@pytest.mark.parametrize("head_dim", [26, 65, 96, 129])
def test_a_single_token_passes_its_gradient_on(head_dim):
    """Its weight is 1, whatever lse is rounded to: no bit of the gradient changes."""
    w, dout = randn(8, 12, 1, head_dim, dtype=torch.float32).requires_grad_(), torch.full((8, 12, 1, head_dim), 0.3)
    (dw,) = torch.autograd.grad(mssa(w, backend="cpp"), w, dout)
    torch.testing.assert_close(dw, dout, rtol=0, atol=0)


@pytest.mark.parametrize("head_dim", [200, 256])
def test_scores_of_many_channels(head_dim):
    """Products of one sign: their sum in one go is off by 5 roundings of the largest score."""
    w = randn(1, 1, 64, head_dim, dtype=torch.float32, seed=2).abs()
    _, lse = mssa(w, scale=1.0, return_lse=True, backend="cpp")
    exact = (w.double() @ w.double().mT).logsumexp(-1)
    assert ((lse - exact).abs() <= 3 * torch.finfo(torch.float32).eps * exact).all()


def test_an_only_key_gets_the_sum_of_all_gradients_to_the_bit():
    """Its weight is 1; that of a score less a rounded lse is not. Taller tokens are measured in any case."""
    w = torch.zeros(1, 64, 130, 16)
    w[..., 0] = torch.linspace(7.0, 8.3, 64).sqrt()[:, None]  # its square is the score, in nats
    kept = torch.arange(130)[None] == 0
    out = mssa(w.requires_grad_(), scale=1.0, key_padding_mask=kept, backend="cpp")
    (dw,) = torch.autograd.grad(out, w, torch.ones_like(out))
    assert (dw[:, :, 0] == 130).all()


@pytest.mark.skipif(shutil.which("nm") is None or shutil.which("c++") is None, reason="needs binutils and g++")
@pytest.mark.parametrize(
    "name",
    [
        "tssa_avx2",
        "ista_avx512",
        pytest.param("mssa_amx", marks=pytest.mark.exhaustive),
        pytest.param("mssa_portable", marks=pytest.mark.exhaustive),
        pytest.param("mssa_avx512_bf16", marks=pytest.mark.exhaustive),
    ],
)
def test_instruction_set_units_share_no_symbol(name, tmp_path):
    """A weak symbol would be linked once, and a machine without the instructions could get the copy that has them."""
    source = libraries.source_folder() / "common" / "cpu" / "isa" / f"{name}.cpp"
    subprocess.run(["c++", *libraries.FLAGS, "-O0", "-c", source, "-o", tmp_path / "unit.o"], check=True)
    symbols = subprocess.run(["nm", tmp_path / "unit.o"], check=True, capture_output=True, text=True).stdout
    # DW.ref. is the address of the unwinder's routine: data, the same everywhere.
    names = [line.split()[-2:] for line in symbols.splitlines()]
    shared = [name for kind, name in names if kind in ("W", "V", "u", "w", "v", "T") and not name.startswith("DW.ref.")]
    assert shared == []
