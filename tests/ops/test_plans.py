"""Calls that a plan repeats: the same bits, and on a repeated call everything that PyTorch's users may ask of one.

The fixture of conftest.py holds every operator test to its plans; these are about which calls repeat, and about what
must not change where they do.
"""

import os
import threading
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import crate_kernels as ck
from crate_kernels import testing
from crate_kernels._core import backends, plan, recording
from crate_kernels._native import extension
from crate_kernels._triton import table
from tests.ops.common import leaves, outputs_and_gradients, randn
from tests.tools.plans.replay import same_bits

pytestmark = pytest.mark.skipif(extension.PATH is None or backends._INTERPRETED, reason="repeats calls of cpp")


@pytest.fixture(autouse=True)
def repeated_calls():
    """Record at the second sight of a kind, as users' calls are."""
    plan.forget()
    yield
    plan.forget()


def inputs(op, seed=0, **sizes):
    """Return the tensors of a small call."""
    if op in ("mssa", "tssa"):
        shape = (sizes.get("batch", 2), 3, sizes.get("seqlen", 9), sizes.get("head_dim", 16))
        w = randn(*shape, seed=seed, dtype=sizes.get("dtype", torch.float32))
        return (w,) if op == "mssa" else (w, torch.linspace(0.5, 1.5, 3))
    x = randn(2, sizes.get("seqlen", 40), 32, seed=seed, dtype=sizes.get("dtype", torch.float32))
    return x, randn(32, 32, seed=seed + 1, dtype=x.dtype) / 6


CALLS = {
    "mssa": ("mssa", {}),
    "mssa-causal": ("mssa", {"causal": True}),
    "mssa-lse": ("mssa", {"return_lse": True}),
    "mssa-mask": ("mssa", {"key_padding_mask": torch.tensor([[True] * 7 + [False] * 2, [True] * 9])}),
    "mssa-dropout": ("mssa", {"dropout_p": 0.2}),
    "tssa": ("tssa", {}),
    "tssa-members": ("tssa", {"return_membership": True}),
    "tssa-mask": ("tssa", {"key_padding_mask": torch.tensor([[True] * 7 + [False] * 2, [True] * 9])}),
    "tssa-causal": ("tssa", {"causal": True}),
    "tssa-bias": ("tssa", {"causal": True, "denom_bias": torch.linspace(0.1, 1, 36).view(3, 12, 1)}),
    "ista": ("ista", {}),
    "ista-two-sided": ("ista", {"nonnegative": False}),
    "ista-few": ("ista", {}, {"seqlen": 2}),
    "ista-overcomplete": ("ista_overcomplete", {}),
}


def call_of(name):
    op, options, *sizes = CALLS[name]
    return partial(getattr(ck, op), **options, backend="cpp"), partial(inputs, op, **(sizes[0] if sizes else {}))


def both(call, tensors):
    """Return outputs and gradients, with the same draw of a seed."""
    torch.manual_seed(3)
    return outputs_and_gradients(call, *tensors)


def hits(function):
    """Return how many plans ran in a call, and its result."""
    before = plan.counts()[0]
    result = function()
    return plan.counts()[0] - before, result


@pytest.mark.parametrize("name", CALLS)
def test_the_third_call_of_a_kind_repeats_the_second(name, monkeypatch):
    call, make = call_of(name)
    for seed in (0, 1):
        found, _ = hits(lambda s=seed: both(call, make(seed=s)))
        assert found == 0
    found, repeated = hits(lambda: both(call, make(seed=2)))
    assert found == 2, "forward and backward"
    monkeypatch.setattr(plan, "is_off", lambda: True)
    found, direct = hits(lambda: both(call, make(seed=2)))
    assert found == 0
    assert all(same_bits(a, b) for a, b in zip(repeated, direct, strict=True))


@pytest.mark.parametrize("name", CALLS)
def test_without_a_gradient(name, monkeypatch):
    call, make = call_of(name)
    with torch.no_grad():
        for seed in (0, 1):
            call(*make(seed=seed))
        torch.manual_seed(5)
        found, repeated = hits(lambda: call(*make(seed=2)))
        assert found == 1
        monkeypatch.setattr(plan, "is_off", lambda: True)
        torch.manual_seed(5)
        direct = call(*make(seed=2))
    pairs = zip(repeated, direct, strict=True) if isinstance(direct, tuple) else [(repeated, direct)]
    assert all(same_bits(a, b) for a, b in pairs)
    assert not any(t.requires_grad for t, _ in [(repeated, 0)] if isinstance(t, torch.Tensor))


def known(name="mssa"):
    """Return a call and its inputs, three times made."""
    call, make = call_of(name)
    for seed in range(3):
        both(call, make(seed=seed))
        with torch.no_grad():
            call(*make(seed=seed))
    return call, make


OTHERS = {
    "longer": lambda w: w.repeat(1, 1, 2, 1),
    "more-sequences": lambda w: w.repeat(2, 1, 1, 1),
    "strides": lambda w: w.transpose(1, 2).contiguous().transpose(1, 2),
    "dtype": lambda w: w.bfloat16(),
    "address": lambda w: torch.cat((w.new_zeros(1), w.flatten()))[1:].view_as(w),
    "expanded": lambda w: w[:1].expand(2, -1, -1, -1),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_tensors_of_another_kind_do_not_repeat(other):
    call, make = known()
    with torch.no_grad():
        w = other(*make(seed=4))
        found, result = hits(lambda: call(w))
        assert found == 0
        torch.testing.assert_close(result, ck.mssa(w, backend="reference"), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "options",
    [{"causal": True}, {"scale": 0.3}, {"return_lse": True, "scale": 0.3}, {"phi": "threshold", "threshold": 0.1}],
)
def test_other_options_do_not_repeat(options):
    call, make = known()
    with torch.no_grad():
        found, _ = hits(lambda: call(*make(), **options))
    assert found == 0


def test_a_scale_that_was_given_is_not_the_default_of_another_head_dim():
    wide, narrow = inputs("mssa", head_dim=16), inputs("mssa", head_dim=4)
    with torch.no_grad():
        for _ in range(3):
            ck.mssa(*narrow, scale=0.25, backend="cpp")
            ck.mssa(*wide, backend="cpp")
        default = ck.mssa(*narrow, backend="cpp")
    torch.testing.assert_close(default, ck.mssa(*narrow, backend="reference"))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mssa-causal", {"causal": 1}),
        ("mssa", {"return_lse": 0}),
        ("mssa", {"scale": True}),
        ("mssa", {"dropout_p": False}),
        ("tssa", {"return_membership": 0}),
        ("tssa", {"causal": torch.ones(2)}),
        ("tssa-bias", {"causal": np.ones(2)}),
        ("ista", {"nonnegative": 1}),
        ("ista", {"step_size": True}),
        ("mssa", {"scale": [1.0]}),
        ("mssa", {"scale": torch.ones(2)}),
        ("mssa", {"dropout_p": torch.ones(2)}),
    ],
)
def test_options_of_a_wrong_type_are_refused_on_a_repeated_call(name, options):
    call, make = known(name)
    with pytest.raises(TypeError, match=f"{next(iter(options))} must be"):
        call(*make(), **options)


def test_a_length_without_offsets_is_not_asked_of_denom_bias():
    call, make = known("tssa-bias")
    w, temp = make()
    with pytest.raises(ValueError, match="tssa: w must be"):
        call(w[0], temp, max_seqlen="9")


WRONG = {
    "integers": torch.Tensor.long,
    "no-batch": lambda w: w[0],
    "a-list": torch.Tensor.tolist,
    "sparse": torch.Tensor.to_sparse,
}


@pytest.mark.parametrize("bad", WRONG.values(), ids=WRONG)
def test_tokens_of_a_wrong_kind_are_refused_on_a_repeated_call(bad):
    call, make = known()
    with pytest.raises((TypeError, ValueError, NotImplementedError, RuntimeError), match=r"mssa: w|parse"):
        call(bad(*make()))


def test_a_temp_of_another_shape_is_refused_on_a_repeated_call():
    call, make = known("tssa")
    w, _ = make()
    with pytest.raises(ValueError, match="temp must be"):
        call(w, torch.ones(1, 3))


def test_in_place_changes_are_refused_on_a_repeated_call():
    call, make = known()
    leaf = make()[0].requires_grad_()
    w = leaf * 1
    out = call(w)
    w.add_(1)
    with pytest.raises(RuntimeError, match=r"mssa: an input or output of this call was changed in place"):
        out.sum().backward()


@pytest.mark.parametrize("name", ["mssa", "tssa", "tssa-causal", "ista"])
def test_double_backward_is_refused_on_a_repeated_call(name):
    call, make = known(name)
    leaf = make()[0].requires_grad_()
    out = call(leaf, *make()[1:])
    (grad,) = torch.autograd.grad(out.sum() if isinstance(out, torch.Tensor) else out[0].sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        torch.autograd.grad(grad.sum(), leaf)


def test_forward_derivatives_are_refused_on_a_repeated_call():
    call, make = known()
    (w,) = make()
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(call, (w,), (w,))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        call(torch.autograd.forward_ad.make_dual(w, w))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_work_on_a_repeated_call():
    call, make = known()
    (w,) = make()
    grad = torch.func.grad(lambda t: call(t).square().sum())(w)
    leaf = w.clone().requires_grad_()
    torch.testing.assert_close(grad, torch.autograd.grad(call(leaf).square().sum(), leaf)[0])
    torch.testing.assert_close(torch.vmap(call)(w[None]), call(w)[None])


@pytest.mark.parametrize("name", ["mssa", "tssa", "ista"])
def test_autocast_is_obeyed_on_a_repeated_call(name):
    call, make = known(name)
    tensors = make()
    with torch.autocast("cpu", torch.bfloat16):
        expected = getattr(ck, CALLS[name][0])(*tensors, backend="reference")
        found = call(*tensors)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=5e-2, atol=5e-2)
    assert call(*tensors).dtype == torch.float32


def test_what_autocast_did_is_not_repeated_without_it():
    call, make = call_of("ista")
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(4):
            call(*make())
    torch.testing.assert_close(call(*make()), ck.ista(*make(), backend="reference"))
    for _ in range(4):
        torch.testing.assert_close(call(*make()), ck.ista(*make(), backend="reference"))


def test_a_profiler_sees_the_op_on_a_repeated_call():
    call, make = known()
    with torch.profiler.profile() as profile:
        call(*make())
    assert "crate_kernels::mssa_fwd" in {event.key for event in profile.key_averages()}


def test_a_mode_sees_the_op_on_a_repeated_call():
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    names = []
    call, make = known()
    (w,) = make()
    with Seen():
        call(w)
    assert names == ["crate_kernels::mssa_fwd"]


def test_hooks_and_names_of_the_graph_are_the_same_on_a_repeated_call():
    call, make = call_of("mssa")
    names, seen = set(), []
    for seed in range(4):
        leaf = make(seed=seed)[0].requires_grad_()
        out = call(leaf)
        names.add(out.grad_fn.name())
        out.grad_fn.register_hook(lambda grads, _: seen.append(len(grads)))
        out.sum().backward()
    assert names == {"MSSAFunctionBackward"}
    assert len(seen) == 4


def test_saved_tensors_that_hooks_change_do_not_repeat():
    call, make = known()
    leaf = make()[0].requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.transpose(1, 2)):
        out = call(leaf)
        before = plan.counts()[0]
        with pytest.raises(RuntimeError):
            torch.autograd.grad(out.sum(), leaf)
    assert plan.counts()[0] == before


def test_compile_after_repeated_calls():
    torch._dynamo.reset()
    call, make = known()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*make()), call(*make()))
    assert torch.export.export(Wrapped(call), make()).module()(*make()).shape == make()[0].shape


class Wrapped(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, w):
        return self.call(w)


def test_inference_mode_and_grad_mode_repeat_apart():
    call, make = known()
    with torch.inference_mode():
        out = call(*make())
        assert out.is_inference()
    leaf = make()[0].requires_grad_()
    assert not call(leaf).is_inference()
    assert call(leaf).requires_grad


def test_a_parameter_repeats():
    call, make = known()
    parameter = torch.nn.Parameter(*make())
    found, out = hits(lambda: call(parameter))
    assert (found, out.requires_grad) == (1, True)


def test_a_tensor_that_is_given_twice():
    """Its plan could not say which of the two a step reads."""
    mask, (w,) = torch.ones(2, 9, dtype=torch.bool), inputs("mssa")
    out, lse = ck.mssa(w, key_padding_mask=mask, return_lse=True, backend="cpp")
    op = torch.ops.crate_kernels.mssa_bwd
    for dout in (w, w, w, torch.ones_like(w)):
        with torch.no_grad():
            dw = op(dout, None, w, out, lse, None, None, 0, None, False, 0.25, 0.0, None, "cpp")
    leaf = w.clone().requires_grad_()
    torch.testing.assert_close(dw, torch.autograd.grad(ck.mssa(leaf, backend="reference").sum(), leaf)[0])


def forced():
    with table.forced(table.Table("none", {}), {}):
        pass


CHANGES = {
    "a backend": lambda: (
        backends.register(backends.Backend("other", "tests.ops.{op}.plain")),
        backends.unregister("other"),
    ),
    "a level": lambda: (extension.set_cpu_capability("portable"), extension.set_cpu_capability()),
    "a table": forced,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_plans_are_forgotten_with_what_they_rest_on(change):
    call, make = known()
    with torch.no_grad():
        assert hits(lambda: call(*make()))[0] == 1
        change()
        assert hits(lambda: call(*make()))[0] == 0


def test_another_precision_of_products_is_another_kind(monkeypatch):
    setting = ["ieee"]
    monkeypatch.setattr(plan, "settings", lambda first: tuple(setting))
    call, make = known()
    with torch.no_grad():
        setting[:] = ["tf32"]
        assert [hits(lambda: call(*make()))[0] for _ in range(3)] == [0, 0, 1]
        setting[:] = ["ieee"]
        assert hits(lambda: call(*make()))[0] == 1


def test_a_tensor_without_memory_does_not_repeat():
    x, weight = inputs("ista")
    zeros = torch._efficientzerotensor(weight.shape)
    with torch.no_grad():
        expected = ck.ista(x, torch.zeros_like(weight), backend="reference")
        for _ in range(4):
            torch.testing.assert_close(ck.ista(x, zeros, backend="cpp"), expected)


def test_another_number_of_threads_is_another_kind(threads):
    call, make = known()
    threads(2)
    with torch.no_grad():
        assert hits(lambda: call(*make()))[0] == 0


def test_threads_do_not_take_each_others_plans():
    call, _ = call_of("mssa-causal")
    reference = partial(ck.mssa, causal=True, backend="reference")
    shapes = [{"seqlen": 1 + n % 10, "batch": 1 + n // 10} for n in range(50)]
    wrong = []

    def work(seed):
        for turn in range(4):
            for n, sizes in enumerate(shapes):
                leaf = inputs("mssa", seed=seed + n + turn, **sizes)[0].requires_grad_()
                out, expected = call(leaf), reference(leaf)
                grads = [torch.autograd.grad(t.square().sum(), leaf)[0] for t in (out, expected)]
                if not (torch.allclose(out, expected, atol=1e-5) and torch.allclose(*grads, atol=1e-4)):
                    wrong.append((seed, sizes))

    workers = [threading.Thread(target=work, args=(1000 * n,)) for n in range(4)]
    found, _ = hits(lambda: [[t.start() for t in workers], [t.join() for t in workers]])
    assert wrong == []
    assert found > 500


def test_a_forked_process_has_the_plans():
    call, make = known()
    with torch.no_grad():
        expected = call(*make(seed=8))
    child = os.fork()
    if child == 0:
        with torch.no_grad():
            found, out = hits(lambda: call(*make(seed=8)))
        os._exit(0 if found == 1 and torch.equal(out, expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("case", [c for c in testing.CASES if not c.options.get("dropout_p")], ids=str)
def test_named_cases_leave_plans(case):
    """Where Python does what no plan repeats, users pay its time: the list is short, and this is it."""
    if testing.SPECS[case.op].excluded(case, "cpp", torch.float32) is not None or case.lengths:
        pytest.skip("no kernel, or offsets whose values a CPU reads")
    refused, words = [], recording.Recorder.words

    def noted(self, results):
        try:
            return words(self, results)
        except recording.Unplannable as reason:
            refused.append(str(reason))
            raise

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording.Recorder, "words", noted)
        for _ in range(2):
            given = leaves(case)
            try:
                result = getattr(ck, case.op)(**given.differentiable, **given.others, **case.options, backend="cpp")
            except NotImplementedError:
                pytest.skip("no kernel")
            first = result[0] if isinstance(result, tuple) else result
            torch.autograd.grad(first.sum(), list(given.differentiable.values()), allow_unused=True)
    assert refused == []
