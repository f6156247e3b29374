"""What must not change on a call that a plan repeats: autograd, dropout, modes, the compiler.

test_repeated_arguments.py has what is refused.
"""

import pytest
import torch
import torch.utils.checkpoint
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

import crate_kernels as ck
from crate_kernels._core import backends, plan
from crate_kernels.ops.mssa.call import MSSACall
from tests.ops.repeated import CALLS, EACH, NEEDS_PLANS, Wrapped, both, call_of, hits, known, repeated_calls  # noqa: F401

pytestmark = NEEDS_PLANS
each = pytest.mark.parametrize("name", EACH)


@pytest.mark.parametrize("name", CALLS)
def test_a_repeated_call_chooses_no_backend_again(name, monkeypatch):
    call, make = known(name)
    monkeypatch.setattr(backends, "resolve", None)
    assert hits(lambda: both(call, make(seed=3)))[0] == 2
    with torch.no_grad():
        assert hits(lambda: call(*make(seed=3)))[0] == 1


def test_every_repeated_call_draws_its_own_dropout():
    call, make = known("mssa-dropout")
    (w,) = make()
    found, (one, other) = hits(lambda: (call(w), call(w)))
    assert found == 2
    assert not torch.equal(one, other)
    torch.manual_seed(1)
    expected = [ck.mssa(w, dropout_p=0.2, backend="reference") for _ in range(2)]
    torch.manual_seed(1)
    torch.testing.assert_close([call(w) for _ in range(2)], expected)


@pytest.mark.parametrize("function", [ck.mssa, lambda w, **more: ck.tssa(w, torch.ones(3, dtype=w.dtype), **more)])
def test_dropout_is_that_of_its_seed_whatever_was_called_before(function):
    """None takes composite in float64, whose draws are not the kernels'."""

    def drawn(dtype):
        torch.manual_seed(0)
        return function(w.to(dtype), dropout_p=0.3), torch.get_rng_state()

    w = torch.randn(2, 3, 9, 16)
    expected = {dtype: drawn(dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)}
    for _ in range(3):
        for dtype, (out, state) in expected.items():
            again, left = drawn(dtype)
            assert torch.equal(again, out)
            assert torch.equal(left, state)


@each
def test_in_place_changes_are_refused_on_a_repeated_call(name):
    call, make = known(name)
    leaf, *others = make()
    w = leaf.requires_grad_() * 1
    found, out = hits(lambda: call(w, *others))
    w.add_(1)
    assert found == 1
    with pytest.raises(RuntimeError, match=r"[mi]?[a-z_]+: an input or output of this call was changed in place"):
        out.sum().backward()


@pytest.mark.parametrize(
    ("name", "place"), [("mssa", 0), ("mssa-lse", 0), ("mssa-lse", 1), ("tssa-members", 1), ("ista", 0)]
)
def test_an_output_changed_in_place_is_refused_on_a_repeated_call(name, place):
    call, make = known(name)
    leaf, *others = make()
    found, outputs = hits(lambda: call(leaf.requires_grad_(), *others))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    with torch.no_grad():
        outputs[place].add_(1)
    assert found == 1
    with pytest.raises(RuntimeError, match=r"[mti]s.a: an input or output of this call was changed in place"):
        outputs[0].sum().backward()


@each
def test_double_backward_is_refused_on_a_repeated_call(name):
    call, make = known(name)
    tensors = [t.requires_grad_() for t in make()]
    loss = call(*tensors).square().sum()  # whose gradient lies in memory as that of the calls before
    assert hits(lambda: torch.autograd.grad(loss, tensors, retain_graph=True))[0] == 1
    grads = torch.autograd.grad(loss, tensors, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        torch.autograd.grad(grads[0].sum(), tensors)


@pytest.mark.parametrize("order", [((0,), (0, 1), (1,)), ((0, 1), (1,), (0,))], ids=["one-first", "both-first"])
@pytest.mark.parametrize("name", ["mssa-lse", "tssa-members"])
def test_either_output_may_have_no_gradient_on_a_repeated_call(name, order):
    call, make = call_of(name)

    def grads(wanted):
        tensors = [t.requires_grad_() for t in make()]
        outputs = call(*tensors)
        return torch.autograd.grad(sum(outputs[place].square().sum() for place in wanted), tensors)

    expected = {}
    for wanted in order:
        plan.forget()
        expected[wanted] = grads(wanted)
    plan.forget()
    for wanted in order:
        for _ in range(3):
            found, actual = hits(lambda wanted=wanted: grads(wanted))
            torch.testing.assert_close(actual, expected[wanted])
        assert found == 2


@each
def test_a_graph_that_was_freed_is_refused_on_a_repeated_call(name):
    call, make = known(name)
    leaf, *others = make()
    loss = call(leaf.requires_grad_(), *others).square().sum()
    torch.autograd.grad(loss, leaf)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, leaf)


@each
def test_forward_derivatives_are_refused_on_a_repeated_call(name):
    call, make = known(name)
    w, *others = make()
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda t: call(t, *others), (w,), (w,))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        call(torch.autograd.forward_ad.make_dual(w, w), *others)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@each
def test_transforms_work_on_a_repeated_call(name):
    call, make = known(name)
    w, *others = make()
    grad = torch.func.grad(lambda t: call(t, *others).square().sum())(w)
    leaf = w.clone().requires_grad_()
    torch.testing.assert_close(grad, torch.autograd.grad(call(leaf, *others).square().sum(), leaf)[0])
    torch.testing.assert_close(torch.vmap(lambda t: call(t, *others))(w[None]), call(w, *others)[None])


class Seen(TorchDispatchMode):
    """Notes our ops, and their arguments."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "crate_kernels":
            self.ops.append((func, args))
        return func(*args, **(kwargs or {}))


@each
def test_a_profiler_and_a_mode_see_both_ops_on_a_repeated_call(name):
    call, make = known(name)
    with torch.profiler.profile() as profile:
        both(call, make())
    with Seen() as mode:
        both(call, make())
    names = [func._schema.name for func, _ in mode.ops]
    assert [each.rpartition("_")[2] for each in names] == ["fwd", "bwd"]
    node = call(*(t.requires_grad_() for t in make())).grad_fn
    assert {*names, type(node).__name__} <= {event.key for event in profile.key_averages()}


@each
def test_hooks_and_names_of_the_graph_are_the_same_on_a_repeated_call(name):
    call, make = call_of(name)
    names, seen = set(), []
    for seed in range(4):
        tensors = [t.requires_grad_() for t in make(seed=seed)]
        tensors[0].register_hook(lambda grad: seen.append("tensor"))
        found, out = hits(lambda inputs=tensors: call(*inputs))
        names.add((out.grad_fn.name(), tuple(type(node).__name__ for node, _ in out.grad_fn.next_functions if node)))
        out.grad_fn.register_prehook(lambda grads: seen.append(f"before {len(grads)}"))
        out.grad_fn.register_hook(lambda grads, _: seen.append("after"))
        out.sum().backward()
    assert found == 1
    assert len(names) == 1
    assert [kind.split()[0] for kind in seen] == ["before", "after", "tensor"] * 4


def test_a_backward_after_another_precision_of_products_does_not_repeat(monkeypatch):
    setting = ["ieee"]
    monkeypatch.setattr(plan, "settings", lambda first: tuple(setting))
    call, make = known()
    leaf = make()[0].requires_grad_()
    for _ in range(3):
        loss = call(leaf).square().sum()
        assert torch.autograd.grad(loss, leaf, retain_graph=True)
    setting[:] = ["tf32"]
    assert hits(lambda: torch.autograd.grad(loss, leaf, retain_graph=True))[0] == 0
    setting[:] = ["ieee"]
    assert hits(lambda: torch.autograd.grad(loss, leaf))[0] == 1


def test_saved_tensors_that_hooks_change_do_not_repeat():
    call, make = known()
    leaf = make()[0].requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.transpose(1, 2)):
        out = call(leaf)
        before = plan.counts()[0]
        with pytest.raises(RuntimeError):
            torch.autograd.grad(out.sum(), leaf)
    assert plan.counts()[0] == before


@each
def test_compile_and_export_after_repeated_calls(name):
    torch._dynamo.reset()
    call, make = known(name)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for one, other in zip(both(compiled, make()), both(call, make()), strict=True):
        torch.testing.assert_close(one, other)
    assert torch.export.export(Wrapped(call), make()).module()(*make()).shape == make()[0].shape


@each
def test_fakes_are_served_on_a_repeated_call(name):
    call, make = known(name)
    expected = call(*make())
    with FakeTensorMode() as mode:
        fake = call(*map(mode.from_tensor, make()))
    meta = call.func(*[t.to("meta") for t in make()], **{**call.keywords, "backend": None})
    for found in (fake, meta):
        assert (found.shape, found.dtype, found.stride()) == (expected.shape, expected.dtype, expected.stride())
    assert isinstance(fake, FakeTensor)
    assert meta.is_meta


@each
def test_schemas_and_fakes_of_both_ops_hold_on_a_repeated_call(name):
    """By the dispatcher too, their calls are repeated."""
    call, make = known(name)
    with Seen() as mode:
        both(call, make())
    for op, args in mode.ops:
        inputs = [t.detach().clone() if isinstance(t, torch.Tensor) else t for t in args]
        with torch.no_grad():
            for _ in range(2):
                op(*inputs)
            found, _ = hits(lambda op=op, inputs=inputs: op(*inputs))
        assert found == 1
        opcheck(op, tuple(inputs), test_utils=("test_schema", "test_faketensor"))


def test_the_op_itself_is_unchanged_on_a_repeated_call():
    call, make = known()
    (w,) = make()
    options = dict(zip(MSSACall._fields, (*MSSACall(), "cpp"), strict=False)) | {"scale": 0.25, "backend": "cpp"}
    op = torch.ops.crate_kernels.mssa_fwd.default
    with torch.no_grad():
        found, (out, _) = hits(lambda: op(w, **options))
    assert found == 1, "by its dispatcher too"
    torch.testing.assert_close(out, call(w), rtol=0, atol=0)
    opcheck(op, (w.requires_grad_(), *options.values()))
    with pytest.raises(RuntimeError, match="missing value for argument"):
        op(w)


def test_inference_mode_and_grad_mode_repeat_apart():
    call, make = known()
    with torch.inference_mode():
        out = call(*make())
        assert out.is_inference()
    leaf = make()[0].requires_grad_()
    assert not call(leaf).is_inference()
    assert call(leaf).requires_grad


@pytest.mark.parametrize(
    "name",
    ["mssa", "mssa-lse", "mssa-mask", "tssa", "tssa-members", "tssa-bias", "ista", "ista-overcomplete", "ista-decoder"],
)
def test_both_passes_of_a_repeated_call_are_their_plans_alone(name, monkeypatch):
    call, make = known(name)
    expected = both(call, make(seed=4))
    monkeypatch.setattr(plan.Planned, "__call__", None)  # what the ops ask for a plan
    found = both(call, make(seed=4))
    assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(expected)


@pytest.mark.parametrize("calls", [1, 4], ids=["without a plan", "by its plan"])
@pytest.mark.parametrize("name", ["mssa", "tssa", "ista"])
def test_a_checkpoint_unpacks_a_tensor_once_on_a_repeated_call(name, calls):
    call, make = call_of(name)
    with torch.no_grad():
        for seed in range(3):
            call(*make(seed=seed))
    for _ in range(calls):
        leaf = make()[0].requires_grad_()
        out = torch.utils.checkpoint.checkpoint(call, leaf, *make()[1:], use_reentrant=False)
        (grad,) = torch.autograd.grad(out.sum(), leaf)
    torch.testing.assert_close(grad, torch.autograd.grad(call(leaf, *make()[1:]).sum(), leaf)[0])


@pytest.mark.parametrize("name", ["tssa", "ista"])
def test_a_repeated_backward_knows_which_gradients_are_wanted(name):
    call, make = known(name)
    for wanted in ((0,), (1,), (0, 1)) * 3:
        leaves = [t.clone().requires_grad_(i in wanted) for i, t in enumerate(make(seed=6))]
        asked = [leaves[i] for i in wanted]
        grads = torch.autograd.grad(call(*leaves).square().sum(), asked)
        expected = torch.autograd.grad(call(*leaves, backend="reference").square().sum(), asked)
        torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-5)
