"""tssa's CUDA kernels under the emulator: every form, boundaries of chunks and clusters, strides, order of sums."""

import itertools

import pytest
import torch

from crate_kernels import TokenStatsCache, testing, tssa
from crate_kernels._core import backends, operator
from crate_kernels.ops.tssa import op
from crate_kernels.ops.tssa.call import Call
from tests.ops.common import DTYPES, outputs_and_gradients, over_budget, randn

FORMS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
# What the full form does with a sequence of a few kB: all of it in one block, spread over a cluster, or in chunks of 32
# tokens. The causal form has chunks of 64 tokens forward and 32 backward wherever a sequence is longer.
DEVICES = {
    "block": {"multiprocessors": 1},
    "cluster": {"capability": 90, "multiprocessors": 16},
    "chunks": {"shared_limit": 11 * 1024},  # the least that takes 512 channels
}
WAYS = pytest.mark.parametrize(
    ("causal", "way"),
    [*((False, way) for way in DEVICES), (True, "block")],
    ids=[*(f"full-{way}" for way in DEVICES), "causal"],
)


@pytest.fixture
def going(device):
    """Return a function that makes the emulated GPU one on which the full form goes a way of ``DEVICES``."""
    return lambda way: device(**DEVICES[way])


def call(causal, backend, **options):
    def function(w, temp, bias=None):
        return tssa(w, temp, causal=causal, denom_bias=bias, return_membership=True, backend=backend, **options)

    return function


def tokens(*shape, dtype=torch.float32, seed=0):
    batch, nheads, seqlen, head_dim = shape
    return randn(batch, seqlen, nheads, head_dim, dtype=dtype, seed=seed).transpose(1, 2)


def temps(nheads):
    return 1 + 0.2 * randn(nheads, seed=7, dtype=torch.float32)


def bias(nheads, seqlen):
    return 0.1 * randn(nheads, seqlen, dtype=torch.float32, seed=3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", testing.cases("tssa"), ids=str)
def test_within_budget(case, dtype, backend):
    assert over_budget(case, dtype, backend, "cpu") == []


def cases(causal):
    """List named cases on either side of the boundaries of tiles (4, 8), marks (8) and chunks (32, 64)."""
    options, form = {"return_membership": True, "causal": causal}, "causal" if causal else "full"
    for n in (32, 33, 72, 129):
        yield testing.Case("tssa", f"{form}-ways-n{n}", (1, 3, n, 32), options)
    for padding in ("left", "scattered", "row"):
        yield testing.Case("tssa", f"{form}-ways-pad-{padding}", (2, 3, 85, 32), options, padding=padding)
    dropout = {**options, "dropout_p": 0.3}
    yield testing.Case("tssa", f"{form}-ways-dropout-packed", (0, 3, 0, 32), dropout, lengths=(64, 0, 101, 1))
    yield testing.Case("tssa", f"{form}-ways-dropout", (2, 3, 69, 32), dropout)
    for special in ("dead channel", "mixed norms"):
        yield testing.Case("tssa", f"{form}-ways-{special}", (1, 3, 77, 32), options, special=special)


@WAYS
@pytest.mark.parametrize("dtype", DTYPES[:2])  # fp16 takes bf16's kernels, and test_within_budget
@pytest.mark.parametrize("number", range(11))
def test_every_way_is_within_budget(number, dtype, causal, way, backend, going):
    going(way)
    assert over_budget(list(cases(causal))[number], dtype, backend, "cpu") == []


def test_the_device_decides_where_tokens_are(library, device):
    """0 chunks is a sequence on chip: in one block's shared memory, or, on sm_90, in that of up to eight."""

    def chunks(w, dout=None):
        return library.cuda_tssa_chunks(False, w, dout, None, 0)

    small, vit, wide = (torch.zeros(8, 12, n, d, dtype=torch.bfloat16) for n, d in ((50, 32), (197, 64), (1024, 64)))
    expected = {75: (0, True, True), 80: (0, True, True), 90: (0, False, False)}
    for capability, (fits, vit_in_chunks, wide_in_chunks) in expected.items():
        limit = {75: 64, 80: 163, 90: 227}[capability] * 1024
        device(capability=capability, shared_limit=limit, multiprocessors=16)
        assert chunks(small) == fits
        assert (chunks(vit) > 0) == vit_in_chunks
        assert (chunks(wide) > 0) == wide_in_chunks
    assert chunks(vit, vit) == 0, "w and dout are in two blocks' shared memory each"
    assert chunks(wide, wide) > 0, "of both, eight blocks hold half"
    # One long sequence would keep eight of very many multiprocessors busy, chunks every one.
    device(capability=90, shared_limit=227 * 1024, multiprocessors=132)
    assert chunks(wide[:1]) > 0


@FORMS
@pytest.mark.parametrize(("capability", "order"), [(80, False), (80, True), (90, True)])
def test_the_same_bits_in_any_order_of_threads(capability, order, causal, backend, device):
    inputs = (tokens(2, 3, 85, 32), temps(3), *((bias(3, 85),) if causal else ()))
    for way in ({"shared_limit": 10 * 1024}, {}):
        results = []
        for descending in (order, False):
            device(capability=capability, multiprocessors=16, descending=descending, **way)
            torch.manual_seed(3)
            results.append(outputs_and_gradients(call(causal, backend, dropout_p=0.2), *inputs))
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)


@WAYS
@pytest.mark.parametrize(
    "shape", [(5, 3), (6, 48), (20, 16), (3, 72), (2, 88), (1, 257), (2, 256), (40, 8), (3, 20)], ids=str
)
def test_any_number_of_heads_and_channels(shape, way, causal, backend, going):
    going(way)
    options = {"causal": causal, "return_membership": True}
    for dtype in (torch.float32, torch.bfloat16):
        case = testing.Case("tssa", f"cuda-heads-{shape}-{causal}", (1, shape[0], 35, shape[1]), options)
        assert over_budget(case, dtype, backend, "cpu") == []


@FORMS
@pytest.mark.parametrize("head_dim", [48, 64])
def test_logits_keep_what_tells_heads_apart(head_dim, causal, backend):
    """A token by itself has q = head_dim whatever it is: logits far from zero and close to each other."""
    w, temp = tokens(8, 3, 1, head_dim), 1 + 0.01 * randn(3, seed=7, dtype=torch.float32)
    more = (bias(3, 1),) if causal else ()
    _, membership = call(causal, backend)(w, temp, *more)
    _, exact = call(causal, "reference")(*(t.double() for t in (w, temp, *more)))
    assert ((membership.double() - exact).abs() <= 4 * torch.finfo(torch.float32).eps * exact).all()


@FORMS
@pytest.mark.parametrize("head_dim", [48, 64])
@pytest.mark.parametrize(("nheads", "seed"), [(2, 1), (6, 0), (6, 1)])
def test_a_head_may_have_nearly_all_of_a_token(nheads, seed, head_dim, causal, backend):
    """There the logits are large and close, and what moves them is rounding unless it is added up with care."""
    options = {"causal": causal, "return_membership": True}
    case = testing.Case("tssa", "mixed-norms-wide", (1, nheads, 40, head_dim), options, special="mixed norms")
    inputs = testing.make_inputs(case, torch.float32, seed=seed)
    eager, exact = (testing.run(case, inputs.to(dtype), "reference") for dtype in (torch.float32, torch.float64))
    measured = testing.measure(testing.run(case, inputs, backend), eager, exact, torch.float32)
    assert [m for m in measured if not m.passed] == []


@WAYS
def test_a_single_token_is_its_own_sum(causal, way, backend, going):
    """Its w^2 / c is 1 whatever w is: two terms of the size of 1 / w cancel exactly, not to their rounding."""
    going(way)
    w = 1e-4 * tokens(4, 3, 1, 32)
    dw = outputs_and_gradients(call(causal, backend), w, temps(3))[2]
    exact = outputs_and_gradients(call(causal, "reference"), w.double(), temps(3).double())[2]
    assert (dw.double() - exact).abs().max() <= 8 * torch.finfo(torch.float32).eps * exact.abs().max()


@FORMS
def test_half_precision_survives_squares_that_overflow(causal, backend):
    case = testing.Case("tssa", f"overflow-{causal}", (1, 3, 65, 16), {"causal": causal}, magnitude=200.0)
    assert over_budget(case, torch.float16, backend, "cpu") == []


def layouts(w):
    """Return the values of ``w`` in strides that kernels must read as they are."""
    wide = torch.stack([w, w.roll(1, -1)], -1)
    padded = torch.nn.functional.pad(w, (1, 3))
    return {
        "contiguous": w.contiguous(),
        "every-other-channel": wide.flatten(-2)[..., ::2],
        "unaligned": padded[..., 1 : 1 + w.shape[-1]],
        "reversed-batch": w.flip(0).contiguous().flip(0),
        "tokens-last": w.transpose(2, 3).contiguous().transpose(2, 3),
    }


@WAYS
@pytest.mark.parametrize("layout", layouts(torch.zeros(1, 1, 1, 1)))
def test_strides_do_not_matter(layout, way, causal, backend, going):
    """Bit for bit where elements are read in the same vectors, and closely where one by one."""
    going(way)
    w, dout = tokens(2, 3, 37, 32), tokens(2, 3, 37, 32, seed=1)

    def results(w, dout):
        w, temp = w.detach().requires_grad_(), temps(3).requires_grad_()
        out, membership = call(causal, backend)(w, temp)
        return out.detach(), membership.detach(), *torch.autograd.grad(out, [w, temp], dout)

    expected, actual = results(w, dout), results(layouts(w)[layout], layouts(dout)[layout])
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-6)
    expanded = results(w, torch.ones(()).expand(w.shape))
    torch.testing.assert_close(expanded, results(w, torch.ones(w.shape)), rtol=2e-5, atol=2e-6)


@WAYS
@pytest.mark.parametrize(
    ("bounds", "longest"), [((2, 9, 9, 60), 51), ((0, 20, 21), 16), ((0, 5), 5)], ids=["gaps", "longer", "rest"]
)
def test_packed_rows_of_no_sequence_are_zero(bounds, longest, way, causal, backend, going):
    """Offsets on a GPU are not looked at by the host: what they leave out is written nevertheless."""
    going(way)
    kernel = backends.kernel("tssa", backend)
    w, dout = (randn(66, 3, 32, dtype=torch.float32, seed=seed) for seed in (0, 1))
    covered = torch.zeros(66, dtype=torch.bool)
    for start, end in itertools.pairwise(bounds):
        covered[start : min(end, start + longest)] = True
    options = Call(cu_seqlens=torch.tensor(bounds, dtype=torch.int32), max_seqlen=longest)
    inputs = (w, temps(3)) + ((None,) if causal else ())
    forward, backward = (kernel.forward_causal, kernel.backward_causal) if causal else (kernel.forward, kernel.backward)
    out, *saved = forward(*inputs, options)
    dw = backward(dout, None, *inputs, *saved, options)[0]
    for rows in (out, saved[0].t(), dw):
        assert rows.isfinite().all()
        assert not rows[~covered].any()
        assert rows[covered].flatten(1).any(1).all()


@FORMS
@pytest.mark.parametrize("bounds", [(-7, 9, 300, 40), (30, 10, 66, 66), (50, 90, 90)], ids=str)
def test_offsets_are_clamped_to_what_exists(bounds, causal, backend):
    """What such offsets mean is nobody's concern; that nothing outside a tensor is touched, the emulator sees."""
    kernel = backends.kernel("tssa", backend)
    w, dout = (randn(66, 3, 32, dtype=torch.float32, seed=seed) for seed in (0, 1))
    options = Call(cu_seqlens=torch.tensor(bounds, dtype=torch.int32), max_seqlen=40)
    inputs = (w, temps(3)) + ((None,) if causal else ())
    forward, backward = (kernel.forward_causal, kernel.backward_causal) if causal else (kernel.forward, kernel.backward)
    out, *saved = forward(*inputs, options)
    assert out.isfinite().all()
    assert backward(dout, None, *inputs, *saved, options)[0].isfinite().all()


@WAYS
def test_any_backward_follows_any_forward(way, causal, backend, going):
    """What is saved is the op's: composite takes up what the kernels saved, and the other way round."""
    going(way)
    w, dout = (tokens(1, 3, 69, 32, seed=seed) for seed in (0, 1))
    more = (bias(3, 69),) if causal else ()
    inputs, options = (w, temps(3), *more), (None, None, 0, torch.tensor(11), 0.3)
    forward, backward = (op.tssa_causal_fwd, op.tssa_causal_bwd) if causal else (op.tssa_fwd, op.tssa_bwd)
    saved = {name: forward(*inputs, *options, name) for name in ("composite", backend)}
    exact = [t.double() for t in inputs]
    exact_saved = forward(*exact, *options, "composite")[1:]

    def gradients(first, second):
        grads = backward(dout, saved[first][1], *inputs, *saved[first][1:], *options, second)
        return dict(zip(("dw", "dtemp", "ddenom_bias"), grads, strict=False))

    oracle = backward(dout.double(), exact_saved[0], *exact, *exact_saved, *options, "composite")
    oracle = dict(zip(("dw", "dtemp", "ddenom_bias"), oracle, strict=False))
    eager = gradients("composite", "composite")
    for first, second in itertools.product(saved, saved):
        measured = testing.measure(gradients(first, second), eager, oracle, torch.float32)
        assert [m for m in measured if not m.passed] == [], (first, second)


@WAYS
def test_dropout_drops_what_the_reference_drops(way, causal, backend, going):
    going(way)
    outs = []
    for name in (backend, "reference"):
        torch.manual_seed(5)
        outs.append(call(causal, name, dropout_p=0.4)(tokens(2, 3, 69, 32), temps(3))[0])
    assert torch.equal(outs[0] == 0, outs[1] == 0)
    assert 0.2 < (outs[0] == 0).double().mean() < 0.6


@pytest.mark.parametrize("seqlen", [33, 133])
def test_causal_prefixes_do_not_depend_on_the_future(seqlen, backend):
    """Bit for bit: a running sum adds in the order of the tokens."""
    w = tokens(2, 3, seqlen, 16)
    other = torch.cat([w[:, :, :20], 5 * w[:, :, 20:]], dim=2)
    results = [call(True, backend)(x, temps(3), bias(3, seqlen)) for x in (w, other)]
    for one, another in zip(*results, strict=True):
        assert torch.equal(one[:, :, :20], another[:, :, :20])
        assert not torch.equal(one, another)


@WAYS
def test_not_a_number_stays_one(causal, way, backend, going):
    going(way)
    w = tokens(1, 3, 75, 32)
    w[0, 1, 20, 3] = torch.nan
    out, membership = call(causal, backend)(w, temps(3))
    assert membership[:, :, 20:].isnan().all()
    assert out[:, :, 20:].isnan().all()
    assert out[:, :, :20].isfinite().all() == causal


@FORMS
def test_nothing_to_do(causal, backend):
    for shape in ((2, 3, 0, 16), (0, 3, 5, 16)):
        inputs = (tokens(*shape), temps(shape[1]), *((bias(*shape[1:3]),) if causal else ()))
        out, membership, dw, *others = outputs_and_gradients(call(causal, backend), *inputs)
        assert (out.shape, membership.shape, dw.shape) == (shape, shape[:3], shape)
        assert not any(t.any() for t in others)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ragged", [False, True], ids=["even", "ragged"])
@pytest.mark.parametrize("longest", [40, 100], ids=["alone", "chunks"])
def test_decoding_goes_on_where_a_prompt_ends(longest, ragged, dtype, backend):
    w, b = tokens(3, 3, longest + 4, 16, dtype=dtype), bias(3, longest + 9)
    kept = torch.tensor([longest, 17, 0] if ragged else [longest] * 3)
    mask = torch.arange(longest) < kept[:, None] if ragged else None
    parts = [(0, 2, None), (2, longest + 2, mask), *((n, n + 1, None) for n in (longest + 2, longest + 3))]

    def decoded(w, name):
        # float64 all through for the oracle
        accumulate = torch.float64 if w.dtype == torch.float64 else torch.float32
        cache, named = TokenStatsCache(3, 3, 16, dtype=accumulate), {}
        for first, last, m in parts:
            step = call(True, name, cache=cache, key_padding_mask=m)
            out, membership = step(w[:, :, first:last], temps(3).to(accumulate), b.to(accumulate))
            named |= {f"out-{first}": out, f"membership-{first}": membership}
        assert cache.lengths.tolist() == (kept + 4).tolist()
        return named | dict(zip(("energy", "weighted", "mass"), cache._tensors(), strict=False))

    results = decoded(w, backend), decoded(w, "reference"), decoded(w.double(), "reference")
    assert [m for m in testing.measure(*results, dtype) if not m.passed] == []


def test_decoding_is_the_forward_token_by_token(backend):
    w, b, cache = tokens(2, 3, 12, 16), bias(3, 12), TokenStatsCache(2, 3, 16)
    steps = [call(True, backend, cache=cache)(w[:, :, n : n + 1], temps(3), b) for n in range(12)]
    out, membership = call(True, backend)(w, temps(3), b)
    torch.testing.assert_close(torch.cat([step[0] for step in steps], 2), out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.cat([step[1] for step in steps], 2), membership, rtol=1e-5, atol=1e-6)


REFUSED = {
    "wide": ((2, 16, 5, 256), r"tokens that fit this GPU's shared memory in its forward pass, got .* = 16 \* 256"),
    "no-channels": ((2, 3, 5, 0), r"tokens with channels, got nheads \* head_dim = 3 \* 0"),
    "no-heads": ((2, 0, 5, 16), r"tokens with channels, got nheads \* head_dim = 0 \* 16"),
}


@FORMS
@pytest.mark.parametrize(("shape", "says"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_and_left_to_composite_for_none(shape, says, causal, backend, device, monkeypatch):
    device(shared_limit=8 * 1024)
    inputs = tokens(*shape), temps(shape[1])
    refusal = f"^tssa: backend='{backend}' takes {says}; use backend='composite'"
    with pytest.raises(NotImplementedError, match=refusal):
        call(causal, backend)(*inputs)
    monkeypatch.setattr(backends, "_PREFERENCE", {"cpu": (backend,)})
    expected = outputs_and_gradients(call(causal, "composite"), *inputs)
    torch.testing.assert_close(outputs_and_gradients(call(causal, None), *inputs), expected, rtol=0, atol=0)
    if causal and all(shape):
        caches = [TokenStatsCache(shape[0], shape[1], shape[3]) for _ in range(3)]
        with pytest.raises(NotImplementedError, match=refusal):
            call(causal, backend, cache=caches[0])(*inputs)
        assert not caches[0].lengths.any()
        steps = [call(causal, name, cache=c)(*inputs) for name, c in zip((None, "composite"), caches[1:], strict=True)]
        torch.testing.assert_close(*steps, rtol=0, atol=0)


def test_the_causal_backward_takes_wide_tokens_in_short_chunks(backend, library, device):
    device(shared_limit=56 * 1024)
    w = tokens(1, 8, 40, 128)
    assert library.cuda_tssa_chunks(True, w, w, None, 0) == 5  # without running sums to keep
    case = testing.Case("tssa", "cuda-wide", (1, 8, 40, 128), {"causal": True})
    assert over_budget(case, torch.float32, backend, "cpu") == []
    device(shared_limit=20 * 1024)  # enough for the forward alone
    out, _ = call(True, backend)(w.requires_grad_(), temps(8))
    with pytest.raises(
        NotImplementedError, match="takes tokens that fit this GPU's shared memory in its backward pass"
    ):
        out.sum().backward()


@pytest.mark.parametrize("name", ["tssa_fwd", "tssa_bwd"])
def test_the_library_takes_the_options_of_a_call(name, library):
    schema = str(getattr(library, f"cuda_{name}").default._schema)
    assert operator.schema_of(Call).replace("SymInt", "int") in schema


@FORMS
def test_what_a_call_allocates(causal, backend, going, monkeypatch):
    """On chip nothing but the results; in chunks a number a head and token, and sets of sums, 1 / 32 of the tokens."""
    sizes = []
    for owner, name in ((backends.kernel("tssa", backend), "_empty_sums"), (Call, "empty_membership")):
        allocate = getattr(owner, name)

        def counted(*args, allocate=allocate, **kwargs):
            allocated = allocate(*args, **kwargs)
            sizes.extend([] if allocated is None else [allocated.numel()])
            return allocated

        monkeypatch.setattr(owner, name, counted)
    w, rows = tokens(2, 3, 128, 32), 2 * 3 * 128
    sums = {n: 2 * (n + 1) * 3 * 33 for n in (2, 4)}
    expected = {
        "block": [rows, sums[2], sums[2], rows, 2 * 5 * 3 * 65, sums[4], sums[4]] if causal else [rows],
        "chunks": [rows, sums[4], sums[4], rows, sums[4], sums[4]],
    }
    for way in ("block",) if causal else ("block", "chunks"):
        going(way)
        sizes.clear()
        outputs_and_gradients(call(causal, backend), w, temps(3))
        assert sizes == expected[way]
