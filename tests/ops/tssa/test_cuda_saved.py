"""The sums that a walking forward saves for its backward, emulated: what they are, who reads them, who has none."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from crate_kernels import testing
from crate_kernels._core import plan
from crate_kernels._triton import table
from crate_kernels.ops.tssa import op
from crate_kernels.ops.tssa.call import TSSACall
from crate_kernels.ops.tssa.cuda import walking
from crate_kernels.ops.tssa.sums import saved_sums
from tests.ops.common import NEEDS_EXTENSION, offsets, outputs_and_gradients, padding, randn
from tests.ops.tssa.common import bias, call, halves, temps
from tests.ops.tssa.walking import PACKED, PAIRS, before_steps, config, saving, step_of

STEP = step_of(PAIRS, 96)  # 80 tokens, by groups of 5
# Steps of a forward in which those of the backward end in another place: within the tokens of a thread, or of a block.
AMONG = config(2, 2, 96, 7)
BF16, FP16 = torch.bfloat16, torch.float16
# Tokens, dtype, configuration of the forward, options.
CASES = {
    "plain": (190, BF16, PAIRS, {}),
    "fp16": (190, FP16, PAIRS, {}),
    "no-bias": (190, BF16, PAIRS, {"bias": False}),
    "packed": (PACKED, BF16, PAIRS, {}),
    "packed-fp16-among": (PACKED, FP16, AMONG, {}),
    "whole-steps": (160, BF16, PAIRS, {}),
    "one-token-more": (161, BF16, PAIRS, {}),
    "among": (250, BF16, AMONG, {}),
    "padded": (190, BF16, PAIRS, {"padding": "scattered"}),
    "padded-among": (190, BF16, AMONG, {"padding": "left"}),
    "dropout": (170, BF16, AMONG, {"dropout_p": 0.3}),
}


def drawn(tokens, dtype, options, seed=0):
    """Return w, temp and bias of two sequences, or of packed ones, and the options of a call of their op."""
    packed = isinstance(tokens, tuple)
    longest = max(tokens) if packed else tokens
    w = randn(sum(tokens), 3, 32, seed=seed).to(dtype) if packed else halves(2, 3, tokens, 32, seed=seed).to(dtype)
    found = TSSACall(
        None if "padding" not in options else padding(options["padding"], 2, tokens),
        offsets(tokens) if packed else None,
        longest if packed else 0,
        torch.tensor(7) if "dropout_p" in options else None,
        options.get("dropout_p", 0.0),
        STEP,
    )
    return w, temps(3), bias(3, longest) if options.get("bias", True) else None, found


@pytest.fixture
def forward(backend, hopper):
    """Return a function that runs a forward of a configuration which saves sums; a GPU is emulated for it."""

    def run(w, temp, denom_bias, options, chosen=PAIRS):
        hopper(chosen, clusters=2)
        with table.forced(walking.FORWARD, chosen), table.forced(walking.BACKWARD, PAIRS):
            return op.tssa_causal_fwd(w, temp, denom_bias, *options, backend)

    return run


@pytest.mark.parametrize(("tokens", "dtype", "chosen", "options"), CASES.values(), ids=CASES)
def test_saved_sums_are_those_through_each_place(tokens, dtype, chosen, options, forward):
    *inputs, call = drawn(tokens, dtype, options)
    _, membership, sums = forward(*inputs, call, chosen)
    exact = saved_sums(inputs[0], membership, call)
    used = before_steps(sums, call)
    assert used.any()
    torch.testing.assert_close(sums[used], exact[used], rtol=2e-6, atol=0)
    assert sums.isfinite().all()


@pytest.mark.parametrize(("tokens", "dtype", "chosen", "options"), CASES.values(), ids=CASES)
def test_a_backward_is_as_exact_with_saved_sums_as_with_those_it_finds(
    tokens, dtype, chosen, options, forward, backend
):
    w, temp, denom_bias, call = drawn(tokens, dtype, options)
    out, membership, sums = forward(w, temp, denom_bias, call, chosen)
    dout, dmembership = randn(*out.shape, seed=8).to(dtype), randn(*membership.shape, seed=9).float()

    def gradients(name, saved, cast=None):
        tensors = [t if cast is None or t is None else t.to(cast) for t in (dout, dmembership, w, temp, denom_bias)]
        exact = cast == torch.float64
        kept = op.tssa_causal_fwd(*tensors[2:], *call, name)[1] if exact else membership
        found = op.tssa_causal_bwd(*tensors, kept, saved.to(kept.dtype), *call, name)
        return dict(zip(("dw", "dtemp", "ddenom_bias"), found, strict=True))

    hidden = sums[:, :0]
    with saving(PAIRS) as read:
        both = [gradients(backend, one) for one in (sums, hidden)]
    assert read == [STEP, 0]
    usual, exact = gradients("composite", hidden), gradients("composite", hidden, torch.float64)
    for found in both:
        assert [m for m in testing.measure(found, usual, exact, dtype) if not m.passed] == []
    for name, one in both[0].items():
        torch.testing.assert_close(one, both[1][name], rtol=0.02, atol=0.02)


def test_a_backward_reads_what_was_saved_and_leaves_it(forward, backend):
    w, temp, denom_bias, call = drawn(190, BF16, {})
    _, *saved = forward(w, temp, denom_bias, call)
    arguments, before = (w.flip(0), saved[0], w, temp, denom_bias), saved[1].clone()
    with saving(PAIRS):
        twice = [op.tssa_causal_bwd(*arguments, *saved, *call, backend) for _ in range(2)]
        assert torch.equal(saved[1], before)
        other = op.tssa_causal_bwd(*arguments, saved[0], 2 * saved[1], *call, backend)
    assert all(map(torch.equal, *twice))
    assert not torch.equal(twice[0][0], other[0])


# What no backward of these steps reads: sums at other places, which it may be handed after tuning; at another address.
LEFT = {
    "other-places": (STEP // 2, lambda sums: sums),
    "none": (STEP, lambda sums: sums[:, :0]),
    "flat-none": (STEP, lambda sums: sums.new_empty(0)),
    "unaligned": (STEP, lambda sums: torch.cat([sums.new_zeros(1), sums.flatten()])[1:].view_as(sums)),
}


@pytest.mark.parametrize(("every", "change"), LEFT.values(), ids=LEFT)
def test_sums_that_are_not_those_before_its_steps_are_left(every, change, forward, backend):
    w, temp, denom_bias, call = drawn(190, BF16, {})
    call = call._replace(sums_every=every)
    _, membership, sums = forward(w, temp, denom_bias, call)
    arguments = w.flip(0), membership, w, temp, denom_bias, membership
    with saving(PAIRS) as read:
        found = op.tssa_causal_bwd(*arguments, change(sums), *call, backend)
        nothing = call._replace(sums_every=0)
        usual = op.tssa_causal_bwd(*arguments, nothing.empty_sums(w), *nothing, backend)
    assert read == [0, 0]
    assert all(map(torch.equal, found, usual))


@pytest.mark.parametrize("tokens", [190, PACKED], ids=["padded", "packed"])
def test_a_forward_of_other_kernels_saves_what_it_is_asked_for(tokens, backend, hopper):
    """A graph that was compiled before tuning, or for another GPU, has the distance in it."""
    hopper(PAIRS)
    w, temp, denom_bias, call = drawn(tokens, BF16, {})
    _, membership, sums = op.tssa_causal_fwd(w, temp, denom_bias, *call, backend)
    torch.testing.assert_close(sums, saved_sums(w, membership, call), rtol=0, atol=0)
    assert sums.shape == (len(tokens) if isinstance(tokens, tuple) else 2, 2, 96 + 4 + 96)
    arguments = w.flip(0), membership, w, temp, denom_bias, membership
    with saving(PAIRS) as read:
        found = op.tssa_causal_bwd(*arguments, sums, *call, backend)
        walked = op.tssa_causal_bwd(*arguments, sums[:, :0], *call, backend)
    assert read == [STEP, 0]
    torch.testing.assert_close(found, walked, rtol=0.02, atol=0.02)


@pytest.fixture
def asked(monkeypatch):
    """Return the list of the distances at which forwards that are not repeated save sums."""
    found, empty = [], TSSACall.empty_sums
    monkeypatch.setattr(TSSACall, "empty_sums", lambda call, w: (found.append(call.sums_every), empty(call, w))[1])
    monkeypatch.setattr(plan, "is_off", lambda: True)
    return found


# Whether both directions walk, tokens, sequences, whether a gradient is wanted, and the distance.
ASKED = {
    "gradient": ((True, True), 190, 2, True, STEP),
    "no-gradient": ((True, True), 190, 2, False, 0),
    "one-step": ((True, True), STEP, 2, True, 0),
    "few-long-sequences": ((True, True), 400, 1, True, 0),  # by chunks
    "another-backward": ((True, False), 190, 2, True, 0),
    "another-forward": ((False, True), 190, 2, True, 0),
    "no-walking": ((False, False), 190, 2, True, 0),
}


@pytest.mark.parametrize(("walks", "seqlen", "batch", "tracked", "every"), ASKED.values(), ids=ASKED)
def test_sums_are_saved_where_a_backward_reads_them(walks, seqlen, batch, tracked, every, backend, device, asked):
    device(capability=90, shared_limit=227 * 1024, multiprocessors=8)
    nothing = {"CLUSTER": 0, "BUFFERS": 0, "THREADS": 0, "TOKENS": 0}
    chosen = [PAIRS if one else nothing for one in walks]
    w = halves(batch, 3, seqlen, 32).requires_grad_(tracked)
    with table.forced(walking.FORWARD, chosen[0]), table.forced(walking.BACKWARD, chosen[1]):
        call(True, backend)(w, temps(3))
    assert asked == [every]


def test_repeated_calls_save_too_and_those_without_a_gradient_do_not(backend, hopper, repeated_calls):
    hopper(PAIRS)
    inputs = halves(2, 3, 190, 32), temps(3), bias(3, 190)
    with table.forced(walking.FORWARD, PAIRS), table.forced(walking.BACKWARD, PAIRS):
        expected = outputs_and_gradients(call(True, backend), *inputs)
    with table.forced(walking.FORWARD, PAIRS), table.forced(walking.BACKWARD, PAIRS):
        for tracked in (False, True, True, False, True, True, True):
            w = inputs[0].detach().requires_grad_(tracked)
            out, _ = call(True, backend)(w, *inputs[1:])
            assert out.requires_grad == tracked
            if tracked:
                sums = [t for t in out.grad_fn.saved_tensors if t is not None and t.shape[2:] == (96 + 4 + 96,)]
                assert [t.shape for t in sums] == [(2, 2, 196)]
        for _ in range(4):
            assert all(map(torch.equal, outputs_and_gradients(call(True, backend), *inputs), expected))
    if repeated_calls is None:
        pytest.skip("needs the C++ extension, which repeats calls: python -m crate_kernels build")
    assert repeated_calls.refused == []


def test_two_calls_do_not_share_what_they_saved(backend, hopper):
    """Their backwards come in the other order, as those of layers do."""
    hopper(PAIRS)
    draws = [halves(2, 3, 190, 32, seed=seed) for seed in range(3)]

    def gradients(order):
        leaves = [w.detach().requires_grad_() for w in draws]
        outs = [call(True, backend)(w, temps(3))[0] for w in leaves]
        return {n: torch.autograd.grad(outs[n], leaves[n], draws[0])[0] for n in order}

    with table.forced(walking.FORWARD, PAIRS), table.forced(walking.BACKWARD, PAIRS):
        found = [gradients(order) for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1))]
    for other in found[1:]:
        assert all(torch.equal(found[0][n], other[n]) for n in range(3))


@pytest.mark.usefixtures("unrepeated")
@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
def test_a_checkpoint_saves_again(reentrant, backend, hopper):
    hopper(PAIRS)
    function = call(True, backend)

    def gradients(apply):
        leaves = [t.requires_grad_() for t in (halves(2, 3, 190, 32), temps(3), bias(3, 190))]
        out, membership = apply(*leaves)
        (out.float().square().sum() + membership.square().sum()).backward()
        return [t.grad for t in leaves]

    with saving(PAIRS) as read:
        expected = gradients(function)
        found = gradients(lambda *tensors: checkpoint(function, *tensors, use_reentrant=reentrant))
    assert read == [STEP, STEP]
    assert all(map(torch.equal, found, expected))


@pytest.mark.usefixtures("unrepeated")
def test_a_compiled_call_saves_too(backend, hopper):
    hopper(PAIRS)
    torch._dynamo.reset()
    w, temp, denom_bias = halves(2, 3, 190, 32), temps(3), bias(3, 190)
    function = call(True, backend)
    with saving(PAIRS) as read:
        expected = outputs_and_gradients(function, w, temp, denom_bias)
        found = outputs_and_gradients(torch.compile(function, fullgraph=True, backend="aot_eager"), w, temp, denom_bias)
    assert read == [STEP, STEP]
    assert all(map(torch.equal, found, expected))


@pytest.mark.usefixtures("unrepeated")
@pytest.mark.exhaustive
def test_a_compiled_call_of_any_length_saves_nothing(backend, hopper):
    """The distance would have to be known for every length."""
    hopper(PAIRS)
    torch._dynamo.reset()
    function = torch.compile(call(True, backend), fullgraph=True, backend="aot_eager", dynamic=True)
    with saving(PAIRS) as read:
        for seqlen in (190, 250):
            inputs = halves(2, 3, seqlen, 32), temps(3), bias(3, seqlen)
            expected = outputs_and_gradients(call(True, backend), *inputs)
            torch.testing.assert_close(outputs_and_gradients(function, *inputs), expected, rtol=0.02, atol=0.02)
    assert read == [STEP, 0, STEP, 0]


def test_a_distance_below_zero_is_refused(backend):
    w, temp, denom_bias, call = drawn(20, BF16, {})
    call = call._replace(sums_every=-1)
    with pytest.raises(ValueError, match=r"^tssa: sums_every must be at least 0, got -1"):
        op.tssa_causal_fwd(w, temp, denom_bias, *call, backend)
    with pytest.raises(ValueError, match=r"^tssa backward: sums_every must be at least 0, got -1"):
        op.tssa_causal_bwd(w, None, w, temp, denom_bias, w.new_ones(2, 3, 20).float(), temp[:0], *call, backend)


@pytest.mark.parametrize("backend", ["composite", pytest.param("cpp", marks=NEEDS_EXTENSION)])
@pytest.mark.parametrize("tokens", [21, (9, 0, 21)], ids=["padded", "packed"])
def test_every_backend_returns_the_sums_that_it_is_asked_for(tokens, backend):
    w, temp, denom_bias, call = drawn(tokens, torch.float32, {})
    call = call._replace(sums_every=4)
    _, membership, sums = op.tssa_causal_fwd(w, temp, denom_bias, *call, backend)
    one = w[9:] if isinstance(tokens, tuple) else w[1].transpose(0, 1)
    members = membership[:, 9:] if isinstance(tokens, tuple) else membership[1]
    squares = one.double().square()
    for place in range(5):
        first = squares[: 4 * (place + 1)]
        weights = members[:, : 4 * (place + 1)].double().t()
        row = [(weights[..., None] * first).sum(0).flatten(), weights.sum(0), torch.zeros(1), first.sum(0).flatten()]
        torch.testing.assert_close(sums[-1, place].double() * 2.0**40, torch.cat(row), rtol=1e-5, atol=1e-6)
