"""Token-statistics attention: loops = reference = every backend, and what the named cases do not show."""

import pytest
import torch

from crate_kernels import testing, tssa
from tests.ops.common import (
    DTYPES,
    EXACT,
    FORMS,
    backends,
    cases_by_dtype,
    keep_mask,
    offsets,
    outputs_and_gradients,
    over_tolerance,
    padding,
    randn,
)
from tests.ops.tssa.common import call
from tests.ops.tssa.naive import tssa_causal_loop, tssa_loop

BACKENDS, FUSED = backends("tssa"), backends("tssa", reference=False)
BATCH, HEADS, SEQLEN, HEAD_DIM = 3, 2, 6, 3
LOOPS = {
    "plain": {},
    "one-head": {"nheads": 1},
    "pad-right": {"pad": "right"},
    "pad-scattered": {"pad": "scattered"},
    "pad-row": {"pad": "row"},
    "dead-channel": {"channel": 0.0},
    "channel-below-the-floor": {"channel": 1e-13},
    "channel-above-the-floor": {"channel": 3e-12},
    "dropout": {"dropout_p": 0.4},
    "dropout-pad": {"dropout_p": 0.4, "pad": "left"},
    "causal": {"causal": True},
    "causal-no-bias": {"causal": True, "bias": False},
    "causal-pad-left": {"causal": True, "pad": "left"},
    "causal-pad-scattered": {"causal": True, "pad": "scattered"},
    "causal-pad-row": {"causal": True, "pad": "row"},
    "causal-dead-channel": {"causal": True, "channel": 0.0},
    "causal-channel-across-the-floor": {"causal": True, "channel": 6e-7},
    "causal-dropout": {"causal": True, "dropout_p": 0.4},
    "causal-dropout-pad": {"causal": True, "dropout_p": 0.4, "pad": "right"},
}


def inputs(causal=False, nheads=HEADS, bias=True, channel=1.0, seqlen=SEQLEN, batch=BATCH):
    """Return w, temp and, for the causal form, a denom_bias longer than the sequence."""
    w = randn(batch, seqlen, nheads, HEAD_DIM).transpose(1, 2)
    w[..., 1] *= channel
    tensors = [w, 1 + 0.3 * randn(nheads, 1, seed=1)]
    return [*tensors, 0.1 * randn(nheads, seqlen + 2, 1, seed=2)] if causal and bias else tensors


def loop(causal, **options):
    def function(w, temp, bias=None):
        return tssa_causal_loop(w, temp, denom_bias=bias, **options) if causal else tssa_loop(w, temp, **options)

    return function


def channel_or_element_mask(causal, heads, seqlen):
    """Return the keep mask: one value a channel, or one an element in the causal form."""
    return keep_mask(5, 0.4, heads, seqlen if causal else 1, HEAD_DIM)


@pytest.mark.parametrize("backend", ["reference", "composite"])
@pytest.mark.parametrize("options", LOOPS.values(), ids=LOOPS)
def test_float64_is_the_loop(options, backend):
    options = dict(options)
    causal, nheads = options.pop("causal", False), options.pop("nheads", HEADS)
    tensors = inputs(causal, nheads, options.pop("bias", True), options.pop("channel", 1.0))
    options["key_padding_mask"] = padding(options.pop("pad", ""), BATCH, SEQLEN)
    keep = None
    if "dropout_p" in options:
        keep = channel_or_element_mask(causal, BATCH * nheads, SEQLEN).view(BATCH, nheads, -1, HEAD_DIM)
        keep = keep if causal else keep[:, :, 0]
    expected = outputs_and_gradients(loop(causal, keep=keep, **options), *tensors)
    torch.manual_seed(5)
    actual = outputs_and_gradients(call(causal, backend, **options), *tensors)
    torch.testing.assert_close(actual, expected, **EXACT)


@pytest.mark.parametrize("backend", ["reference", "composite"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4], ids=["plain", "dropout"])
@FORMS
def test_packed_is_the_loop_on_each_sequence(causal, dropout_p, backend):
    lengths = (3, 0, 5, 1)
    keep = channel_or_element_mask(causal, len(lengths) * HEADS, max(lengths)) if dropout_p else None
    if keep is not None and not causal:
        keep = keep[:, 0]

    def each(w, temp, *bias):
        parts = []
        for b, one in enumerate(w.split(lengths)):
            kept = None if keep is None else keep[None, b * HEADS : (b + 1) * HEADS]
            if len(one):
                parts.append(loop(causal, keep=kept, dropout_p=dropout_p)(one.transpose(0, 1)[None], temp, *bias))
        return torch.cat([out[0].transpose(0, 1) for out, _ in parts]), torch.cat([m[0] for _, m in parts], 1)

    w, *others = inputs(causal, seqlen=sum(lengths), batch=1)
    packed = call(causal, backend, cu_seqlens=offsets(lengths), max_seqlen=5, dropout_p=dropout_p)
    tensors = w[0].transpose(0, 1), *others
    torch.manual_seed(5)
    actual = outputs_and_gradients(packed, *tensors)
    torch.testing.assert_close(actual, outputs_and_gradients(each, *tensors), **EXACT)


@FORMS
def test_gradcheck(causal):
    tensors = [t.requires_grad_() for t in inputs(causal, seqlen=3, batch=2)]
    assert torch.autograd.gradcheck(call(causal, "reference", key_padding_mask=padding("left", 2, 3)), tensors)


@FORMS
def test_second_derivatives_of_the_reference(causal):
    tensors = [t.requires_grad_() for t in inputs(causal, seqlen=3, batch=1)]
    assert torch.autograd.gradgradcheck(call(causal, "reference"), tensors)


@pytest.mark.parametrize(("backend", "device"), FUSED)
@pytest.mark.parametrize(("case", "dtype"), cases_by_dtype("tssa"))
def test_within_tolerance(case, dtype, backend, device):
    assert over_tolerance(case, dtype, backend, device) == []


NORMS = [
    testing.Case("tssa", name, (1, 3, 65, 16), {"return_membership": True, "causal": causal}, **how)
    for causal in (False, True)
    for name, how in {
        f"wide-norms-{causal}": {"special": "mixed norms", "magnitude": 4.0},
        f"tiny-{causal}": {"magnitude": 2e-2},
    }.items()
]


@pytest.mark.parametrize(("backend", "device"), FUSED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", NORMS, ids=str)
def test_very_different_norms_are_within_tolerance(case, dtype, backend, device):
    assert over_tolerance(case, dtype, backend, device) == []


# NumPy, which the interpreter adds up a tile by, adds one number after the other.
@FORMS
@pytest.mark.parametrize(("backend", "device"), [param for param in FUSED if param.values != ("triton", "cpu")])
def test_rounding_does_not_grow_with_the_sequence(backend, device, causal):
    w, temp = randn(1, 2, 16384, 4, device=device), torch.ones(2, dtype=torch.float64, device=device)
    exact = tssa(w, temp, causal=causal, backend="reference")

    def error(backend):
        return (tssa(w.float(), temp.float(), causal=causal, backend=backend).double() - exact).abs().max()

    assert error(backend) <= 3 * error("reference")  # nine times, if all are added one after the other


@pytest.mark.parametrize(("backend", "device"), FUSED)
@FORMS
def test_half_precision_survives_squares_that_overflow(causal, backend, device):
    case = testing.Case("tssa", f"overflow-{causal}", (1, 3, 65, 16), {"causal": causal}, magnitude=200.0)
    tensors = testing.make_inputs(case, torch.float16, device).differentiable
    assert tensors["w"].double().square().max() > torch.finfo(torch.float16).max
    assert tssa(**tensors, causal=causal, backend="reference").isnan().any(), "published code has become finite"
    assert over_tolerance(case, torch.float16, backend, device) == []


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@FORMS
def test_a_dead_channel_stays_dead(causal, dtype, backend, device):
    w = randn(2, 9, 3, 16, dtype=dtype, device=device).transpose(1, 2)
    w[..., 3] = 0.0
    temp = torch.ones(3, dtype=dtype, device=device)
    out, membership, dw, dtemp = outputs_and_gradients(call(causal, backend), w, temp)
    assert not out[..., 3].any()
    assert all(t.isfinite().all() for t in (out, membership, dw, dtemp))
    # The channel adds exactly nothing to the similarity, so the others cannot tell.
    without = call(causal, backend)(torch.cat([w[..., :3], w[..., 4:]], -1), temp)
    torch.testing.assert_close((torch.cat([out[..., :3], out[..., 4:]], -1), membership), without)


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@FORMS
def test_tokens_without_any_to_sum_over_stay_finite(causal, dtype, backend, device):
    w = randn(2, 9, 3, 16, dtype=dtype, device=device).transpose(1, 2)
    temp = torch.ones(3, dtype=dtype, device=device)
    mask = torch.tensor([[False] * 3 + [True] * 6, [False] * 9], device=device)
    results = outputs_and_gradients(call(causal, backend, key_padding_mask=mask), w, temp)
    assert all(t.isfinite().all() for t in results)


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@FORMS
def test_membership_is_a_distribution_over_heads(causal, dtype, backend, device):
    w = randn(2, 5, 3, 16, dtype=dtype, device=device).transpose(1, 2)
    mask = torch.tensor([[True] * 5, [False] * 5], device=device)
    out, membership = call(causal, backend, key_padding_mask=mask)(w, torch.ones(3, device=device))
    assert (membership.dtype, tuple(membership.shape), out.dtype) == (torch.float32, (2, 3, 5), dtype)
    tolerance = 4 * torch.finfo(dtype if backend == "reference" else torch.float32).eps
    torch.testing.assert_close(membership[0].sum(0), torch.ones(5, device=device), rtol=0, atol=tolerance)
    assert not membership[1].any()
    assert not out[1].any()


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_packed_membership_is_heads_by_total(backend, device):
    w, temp = randn(5, 4, 16, dtype=torch.float32, device=device), torch.ones(4, device=device)
    packing = {"cu_seqlens": offsets((2, 3)).to(device), "max_seqlen": 3}
    out, membership = call(False, backend, **packing)(w, temp)
    assert (out.shape, membership.shape) == ((5, 4, 16), (4, 5))


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@FORMS
def test_packed_nothing_below_a_longer_max_seqlen(causal, backend, device):
    w, temp = torch.ones(0, 3, 16, device=device), torch.ones(3, device=device)
    packing = {"cu_seqlens": offsets((0, 0)).to(device), "max_seqlen": 4}
    out, membership, dw, dtemp = outputs_and_gradients(call(causal, backend, **packing), w, temp)
    assert (out.shape, membership.shape, dw.shape) == ((0, 3, 16), (3, 0), (0, 3, 16))
    assert not dtemp.any()


@pytest.mark.parametrize(("backend", "device"), FUSED)
@pytest.mark.parametrize("layout", ["projection", "contiguous"])
@FORMS
def test_merging_the_heads_of_the_output_is_a_view(causal, layout, backend, device):
    w = randn(2, 9, 3, 16, dtype=torch.float32, device=device).transpose(1, 2)
    w = w.contiguous() if layout == "contiguous" else w
    out, _ = call(causal, backend)(w.requires_grad_(), torch.ones(3, device=device))
    assert out.transpose(1, 2).flatten(2).data_ptr() == out.data_ptr()


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@FORMS
def test_right_padding_equals_no_padding(causal, backend, device):
    w = randn(2, 9, 3, 16, dtype=torch.float32, device=device).transpose(1, 2)
    temp, lengths = torch.tensor([0.8, 1.0, 1.3], device=device), (4, 9)
    mask = torch.arange(9, device=device) < torch.tensor(lengths, device=device)[:, None]
    out, membership = call(causal, backend, key_padding_mask=mask)(w, temp)
    for b, length in enumerate(lengths):
        alone = call(causal, backend)(w[b : b + 1, :, :length], temp)
        torch.testing.assert_close((out[b : b + 1, :, :length], membership[b : b + 1, :, :length]), alone)


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_causal_prefixes_do_not_depend_on_the_future(backend, device):
    """Bit for bit: a running sum adds in the order of the tokens."""
    w = randn(2, 33, 3, 16, dtype=torch.float32, device=device).transpose(1, 2)
    other = torch.cat([w[:, :, :16], 5 * w[:, :, 16:]], dim=2)
    results = [call(True, backend)(tokens, torch.ones(3, device=device)) for tokens in (w, other)]
    for one, another in zip(*results, strict=True):
        assert torch.equal(one[:, :, :16], another[:, :, :16])


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_denom_bias_has_no_gradient_beyond_the_sequence(backend, device):
    tensors = [t.to(device, torch.float32) for t in inputs(causal=True)]
    longer = outputs_and_gradients(call(True, backend), *tensors)
    exact = outputs_and_gradients(call(True, backend), *tensors[:2], tensors[2][:, :SEQLEN, 0])
    assert longer[4].shape == tensors[2].shape
    assert not longer[4][:, SEQLEN:].any()
    torch.testing.assert_close([*longer[:4], longer[4][:, :SEQLEN, 0]], exact, rtol=0, atol=0)


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@FORMS
def test_temp_with_and_without_its_last_dimension(causal, backend, device):
    w, temp = (t.to(device, torch.float32) for t in inputs()[:2])
    column = outputs_and_gradients(call(causal, backend), w, temp)
    row = outputs_and_gradients(call(causal, backend), w, temp[:, 0])
    assert (column[3].shape, row[3].shape) == ((HEADS, 1), (HEADS,))
    torch.testing.assert_close([*column[:3], column[3][:, 0]], row, rtol=0, atol=0)


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@FORMS
def test_float32_parameters_beside_half_tokens(causal, backend, device):
    w, *parameters = (t.to(device, torch.float32) for t in inputs(causal))
    w, names = w.to(torch.bfloat16), ["out", "membership", "dw", "dtemp", "ddenom_bias"][: 3 + len(parameters)]
    actual = outputs_and_gradients(call(causal, backend), w, *parameters)
    eager = outputs_and_gradients(call(causal, "reference"), w, *parameters)
    exact = outputs_and_gradients(call(causal, "reference"), w.double(), *(p.double() for p in parameters))
    assert [t.dtype for t in actual[2:]] == [w.dtype, *[torch.float32] * len(parameters)]
    named = [dict(zip(names, results, strict=True)) for results in (actual, eager, exact)]
    assert [m for m in testing.measure(*named, w.dtype) if not m.passed] == []


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@FORMS
def test_dropout_repeats_with_the_seed(causal, backend, device):
    w = randn(2, 9, 3, 16, dtype=torch.float32, device=device).transpose(1, 2)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(call(causal, backend, dropout_p=0.5)(w, torch.ones(3, device=device))[0])
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    assert abs((outs[0] == 0).double().mean() - 0.5) < (0.1 if causal else 0.26)  # 5 sigma of 864 or 96 draws


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@FORMS
@pytest.mark.parametrize("which", [0, 1], ids=["out", "membership"])
def test_a_loss_may_be_of_one_output_alone(which, causal, backend, device):
    tensors = [t.to(device, torch.float32) for t in inputs(causal)]
    exact = outputs_and_gradients(lambda *t: call(causal, "reference")(*t)[which], *(t.double() for t in tensors))
    actual = outputs_and_gradients(lambda *t: call(causal, backend)(*t)[which], *tensors)
    assert exact[1].any()
    torch.testing.assert_close([t.double() for t in actual], exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@FORMS
def test_autocast_leaves_the_tokens_alone(causal, backend, device):
    tensors = [t.to(device, torch.float32) for t in inputs(causal)]
    expected = outputs_and_gradients(call(causal, backend), *tensors)
    with torch.autocast(device, dtype=torch.bfloat16):
        actual = outputs_and_gradients(call(causal, backend), *tensors)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@FORMS
def test_autocast_to_another_half_dtype_leaves_packed_tokens_alone(causal, backend, device):
    """PyTorch cannot concatenate float16 under an autocast to bfloat16."""
    w, temp = randn(9, HEADS, HEAD_DIM, dtype=torch.float16, device=device), torch.ones(HEADS, device=device)
    tokens = call(causal, backend, cu_seqlens=offsets([4, 5]).to(device), max_seqlen=5)
    with torch.autocast(device, dtype=torch.bfloat16):
        actual = tokens(w, temp.half())
    torch.testing.assert_close(actual, tokens(w, temp.half()))
