"""Token-statistics attention in Triton: both ways of each form, boundaries of chunks, strides, order of sums."""

from contextlib import ExitStack, contextmanager

import pytest
import torch

from crate_kernels import TokenStatsCache, testing
from crate_kernels._triton import launch
from crate_kernels._triton.table import forced
from crate_kernels.ops.tssa import op
from crate_kernels.ops.tssa.call import TSSACall
from crate_kernels.ops.tssa.triton import tables
from crate_kernels.ops.tssa.triton.launch import TokenSizes, causal_tile
from tests.ops.common import FORMS, backends, outputs_and_gradients, over_tolerance, randn
from tests.ops.tssa import uncovered
from tests.ops.tssa.common import bias, call, temps, tokens
from tests.ops.tssa.sums import distinct_heads, nearly_all_of_a_token

TRITON = [p for p in backends("tssa") if p.values[0] == "triton"]
if not TRITON:
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

EACH = pytest.mark.parametrize(("backend", "device"), TRITON)
WAYS = pytest.mark.parametrize("way", ["whole", "chunks"])


@contextmanager
def going(way, lane=64):
    """Make launches take a whole sequence, or chunks of 16 tokens in tiles of 8 (backward: 4, of ``lane`` channels)."""
    whole = way == "whole"
    full = {"TILE": 512, "CHUNK": 16, "WHOLE": 1 << 20 if whole else 0, "CROWD": 0, "STAGES": 2}
    full |= {"LANE": 0, "num_warps": 4}
    length = 1 << 10 if whole else 16
    forward, backward = ({"TOKENS": n, "CHUNK": length, "STAGES": 2, "LANE": lane} for n, lane in ((8, 64), (4, lane)))
    configs = {
        tables.FULL_FORWARD: full,
        tables.FULL_BACKWARD: full,
        tables.CAUSAL_FORWARD: forward,
        tables.CAUSAL_BACKWARD: backward,
    }
    with ExitStack() as stack:
        for table, config in configs.items():
            stack.enter_context(forced(table, config))
        yield


def cases():
    """List named cases on either side of the boundaries of tiles (4, 8) and chunks (16); whole, test_tssa has them."""
    for causal in (False, True):
        options, form = {"return_membership": True, "causal": causal}, "causal" if causal else "full"
        for n in (8, 16, 17, 33):
            yield testing.Case("tssa", f"{form}-chunks-n{n}", (1, 3, n, 16), options)
        for padding in ("left", "row"):
            yield testing.Case("tssa", f"{form}-chunks-pad-{padding}", (2, 3, 21, 16), options, padding=padding)
        dropout = {**options, "dropout_p": 0.3}
        yield testing.Case("tssa", f"{form}-chunks-dropout-packed", (0, 3, 0, 16), dropout, lengths=(16, 0, 17, 1))
        for special in ("dead channel", "mixed norms"):
            yield testing.Case("tssa", f"{form}-chunks-{special}", (1, 3, 35, 16), options, special=special)


@EACH
@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_chunks_are_within_tolerance(case, backend, device):
    apart = case.name.endswith(("n33", "packed"))  # a program per head, in the causal backward
    with going("chunks", lane=1 if apart else 64):
        assert over_tolerance(case, torch.float32, backend, device) == []


@EACH
@FORMS
@pytest.mark.parametrize("head_dim", [48, 64])
def test_logits_keep_what_tells_heads_apart(head_dim, causal, backend, device):
    distinct_heads(head_dim, causal, backend, device)


@EACH
@FORMS
@pytest.mark.parametrize("head_dim", [48, 64])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_head_may_have_nearly_all_of_a_token(seed, head_dim, causal, backend, device):
    nearly_all_of_a_token(6, seed, head_dim, causal, backend, device)


@EACH
@FORMS
@pytest.mark.parametrize("shape", [(5, 3), (6, 48), (20, 16), (3, 72), (2, 88), (1, 257)], ids=str)
def test_any_number_of_heads_and_channels(shape, causal, backend, device):
    options = {"causal": causal, "return_membership": True}
    case = testing.Case("tssa", f"heads-{shape}-{causal}", (2, shape[0], 19, shape[1]), options)
    assert over_tolerance(case, torch.float32, backend, device) == []


STRIDES = {
    "channels-apart": lambda w: w.repeat_interleave(3, -1)[..., ::3],
    "expanded": lambda w: w[:1].expand(w.shape),
}


def assert_same(found, expected, device):
    """Require the same bits; on a GPU the layout of threads follows the strides, and so does the order of sums."""
    tolerance = {"rtol": 0, "atol": 0} if device == "cpu" else {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(found, expected, **tolerance)


@EACH
@FORMS
@pytest.mark.parametrize("lay_out", STRIDES.values(), ids=STRIDES)
def test_strides_change_no_result(lay_out, causal, backend, device):
    w, dout = (lay_out(tokens(2, 3, 19, 16, seed=seed, device=device)) for seed in (0, 1))
    dmembership = randn(3, 19, dtype=torch.float32, device=device, seed=2).expand(2, 3, 19)

    def run(w, dout, dmembership):
        w, temp = w.detach().requires_grad_(), temps(3, device).requires_grad_()
        out, membership = call(causal, backend)(w, temp)
        grads = torch.autograd.grad([out, membership], [w, temp], [dout, dmembership])
        return out.detach(), membership.detach(), *grads

    with going("chunks"):
        expected = run(*(t.contiguous() for t in (w, dout, dmembership)))
        assert_same(run(w, dout, dmembership), expected, device)


@EACH
@FORMS
@WAYS
def test_no_bit_changes_from_call_to_call(way, causal, backend, device):
    tensors = tokens(1, 3, 35, 16, device=device), temps(3, device)
    with going(way):
        first, second = (outputs_and_gradients(call(causal, backend), *tensors) for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@EACH
@WAYS
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy, where it interprets
@pytest.mark.parametrize("future", [5.0, torch.nan], ids=["larger", "nan"])
def test_no_bit_depends_on_the_future(future, way, backend, device):
    w = tokens(2, 3, 50, 16, device=device)
    other = torch.cat([w[:, :, :21], future * w[:, :, 21:]], dim=2)
    with going(way):
        results = [call(True, backend)(each, temps(3, device)) for each in (w, other)]
    for one, another in zip(*results, strict=True):
        assert torch.equal(one[:, :, :21], another[:, :, :21])
        assert one.isfinite().all()


@EACH
@FORMS
@WAYS
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy, where it interprets
def test_not_a_number_stays_one(way, causal, backend, device):
    w = tokens(1, 3, 40, 16, device=device)
    w[0, 1, 20, 3] = torch.nan
    with going(way):
        out, membership = call(causal, backend)(w, temps(3, device))
    assert membership[:, :, 20:].isnan().all()
    assert out[:, :, 20:].isnan().all()
    assert out[:, :, :20].isfinite().all() == causal


@EACH
@FORMS
@WAYS
def test_any_backward_follows_any_forward(way, causal, backend, device):
    """What is saved is the op's: composite takes up what Triton's forward saved, and the other way round."""
    w, dout = (tokens(1, 3, 21, 16, seed=seed, device=device) for seed in (0, 1))
    more = (bias(3, 21, device),) if causal else ()
    inputs, options = (w, temps(3, device), *more), (None, None, 0, torch.tensor(11, device=device), 0.3, 0)
    forward, backward = (op.tssa_causal_fwd, op.tssa_causal_bwd) if causal else (op.tssa_fwd, op.tssa_bwd)
    with going(way):
        saved = {name: forward(*inputs, *options, name) for name in ("composite", backend)}
        grads = [
            backward(dout, saved[first][1], *inputs, *saved[first][1:], *options, second)
            for first in saved
            for second in saved
        ]
    for other in grads[1:]:
        torch.testing.assert_close(other, grads[0], rtol=1e-4, atol=1e-5)


@EACH
@FORMS
@WAYS
@pytest.mark.parametrize(
    ("bounds", "longest"), [((2, 9, 9, 30), 25), ((0, 20, 21), 16), ((0, 5), 5)], ids=["gaps", "longer", "rest"]
)
def test_packed_rows_of_no_sequence_are_zero(bounds, longest, way, causal, backend, device):
    """Offsets on a GPU are not looked at by the host: what they leave out is written nevertheless."""
    w = randn(33, 3, 16, dtype=torch.float32, device=device)
    with going(way):
        uncovered.check(bounds, longest, causal, backend, w, temps(3, device))


@EACH
@pytest.mark.parametrize("ragged", [False, True], ids=["even", "ragged"])
def test_a_long_prompt_goes_by_chunks(ragged, backend, device):
    """Its sums then continue the state, and single steps continue them."""
    w, biases = tokens(3, 3, 50, 16, device=device), bias(3, 60, device)
    kept = torch.tensor([40, 17, 0] if ragged else [40] * 3, device=device)
    mask = torch.arange(40, device=device) < kept[:, None] if ragged else None
    results = []
    for way in ("whole", "chunks"):
        cache = TokenStatsCache(3, 3, 16, device=device)
        with going(way):
            parts = [
                call(True, backend, cache=cache, key_padding_mask=m)(part, temps(3, device), biases)
                for part, m in ((w[:, :, :2], None), (w[:, :, 2:42], mask), (w[:, :, 42:43], None))
            ]
        assert cache.lengths.tolist() == (kept + 3).tolist()
        sums = [t.float() for t in cache._tensors()]  # of tokens that were added up in float32
        results.append([*(t for part in parts for t in part), *sums])
    torch.testing.assert_close(results[1], results[0])


@EACH
@pytest.mark.parametrize("lengths", [(), (5, 0, 20, 1, 9, 3)], ids=["padded", "packed"])
def test_the_gradient_of_the_bias_adds_many_sequences(lengths, backend, device):
    """More than four sequences are added in parts, in one launch, and these in another."""
    shape = (0, 3, 0, 16) if lengths else (9, 3, 20, 16)
    case = testing.Case("tssa", f"bias-many-{bool(lengths)}", shape, {"causal": True}, lengths=lengths)
    assert over_tolerance(case, torch.float32, backend, device) == []


@EACH
def test_the_bias_ends_with_the_sequence_not_with_the_tensor(backend, device):
    """Rows of the bias lie as far apart as the caller's tensor has them."""
    w, wide = tokens(2, 3, 19, 16, device=device), randn(3, 64, dtype=torch.float32, device=device, seed=3)
    cut = outputs_and_gradients(call(True, backend), w, temps(3, device), wide[:, :19].contiguous())
    view = outputs_and_gradients(lambda w, t, b: call(True, backend)(w, t, b[:, ::2]), w, temps(3, device), wide)
    every_other = outputs_and_gradients(call(True, backend), w, temps(3, device), wide[:, ::2].contiguous())
    assert_same(view[:4], every_other[:4], device)
    assert not torch.equal(cut[0], view[0])


@EACH
def test_a_bias_of_packed_sequences_covers_the_longest(backend, device):
    """Its gradient is written as far: behind a shorter one is memory of others."""
    w, offsets = randn(9, 3, 16, dtype=torch.float32, device=device), torch.tensor([0, 4, 9], dtype=torch.int32)
    inputs = w, temps(3, device), bias(3, 4, device)
    packed = TSSACall(cu_seqlens=offsets.to(device), max_seqlen=5)
    match = r"denom_bias must be .*\(3, 5\) on .*, got .*\(3, 4\)"
    with pytest.raises(ValueError, match=match):
        op.tssa_causal_fwd(*inputs, *packed, backend)
    with pytest.raises(ValueError, match=match):
        op.tssa_causal_bwd(w, None, *inputs, w.new_ones(3, 9), packed.empty_sums(w), *packed, backend)


def test_users_are_not_shown_interpreted_bfloat16():
    """Only the tests' interpreter computes it."""
    case = testing.cases("tssa")[0]
    assert testing.excluded(case, "triton", torch.bfloat16) is not None


@pytest.mark.parametrize(("sequences", "forward"), [(32, 1), (8, 38)], ids=["many", "few"])
def test_only_a_forward_of_many_sequences_leaves_them_whole(sequences, forward, monkeypatch):
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 1)
    sizes = TokenSizes(torch.empty(sequences, 3, 600, 16), TSSACall())
    with going("chunks"):
        assert causal_tile(tables.CAUSAL_FORWARD, sizes, alone=True)[1] == forward
        assert causal_tile(tables.CAUSAL_FORWARD, sizes)[1] == 38
        tile, nchunks = causal_tile(tables.CAUSAL_BACKWARD, sizes)
    assert (tile["chunk_size"], tile["nchunks"], nchunks) == (16, 38, 38)
