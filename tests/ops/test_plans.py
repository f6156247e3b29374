"""Which calls a plan repeats, and to the same bits; test_repeated.py has what must not change where they do.

The fixture of conftest.py compares every operator test with its plans.
"""

import os
import tempfile

import pytest
import torch

import crate_kernels as ck
from crate_kernels import testing
from crate_kernels._core import backends, launches, plan, recording
from crate_kernels._native import extension
from crate_kernels._triton import table
from crate_kernels.ops.mssa import op
from crate_kernels.ops.mssa.call import MSSACall
from tests.ops.common import leaves
from tests.ops.repeated import CALLS, NEEDS_PLANS, both, call_of, hits, inputs, known, repeated_calls  # noqa: F401
from tests.tools.plans.replay import same_bits

pytestmark = NEEDS_PLANS


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
    pairs = list(zip(repeated, direct, strict=True)) if isinstance(direct, tuple) else [(repeated, direct)]
    assert all(same_bits(a, b) and not a.requires_grad for a, b in pairs)


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


def test_a_passed_scale_is_not_the_default_of_another_head_dim():
    wide, narrow = inputs("mssa", head_dim=16), inputs("mssa", head_dim=4)
    with torch.no_grad():
        for _ in range(3):
            ck.mssa(*narrow, scale=0.25, backend="cpp")
            ck.mssa(*wide, backend="cpp")
        default = ck.mssa(*narrow, backend="cpp")
    torch.testing.assert_close(default, ck.mssa(*narrow, backend="reference"))


def test_a_parameter_repeats():
    call, make = known()
    parameter = torch.nn.Parameter(*make())
    found, out = hits(lambda: call(parameter))
    assert (found, out.requires_grad) == (1, True)


def test_a_tensor_that_is_passed_twice():
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


def tuned():
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setenv("XDG_CACHE_HOME", folder)
        table.write_user_rows("a GPU", {"a kernel": [table.LaunchRow({"warps": 4})]})
    table.user_rows.cache_clear()


CHANGES = {
    "a backend": lambda: (
        backends.register(backends.Backend("other", "tests.ops.{op}.plain")),
        backends.unregister("other"),
    ),
    "a level": lambda: (extension.set_cpu_capability("portable"), extension.set_cpu_capability()),
    "a table": forced,
    "tuned rows": tuned,
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


def test_a_gradient_without_memory_leaves_no_plan_for_others():
    w = torch.randn(2, 3, 9, 16)

    def gradient(dout):
        x = w.clone().requires_grad_()
        out = ck.mssa(x, backend="cpp")
        out.backward(dout(out))
        return x.grad

    for _ in range(3):
        assert not gradient(lambda out: torch._efficientzerotensor(out.shape)).any()
    expected = gradient(lambda out: torch.ones_like(out))
    for _ in range(3):  # of the strides that take the place of such a tensor's
        torch.testing.assert_close(gradient(lambda out: torch.ones(()).expand(out.shape)), expected)


def test_another_number_of_threads_is_another_kind(threads):
    call, make = known()
    threads(2)
    with torch.no_grad():
        assert hits(lambda: call(*make()))[0] == 0


TOO_LARGE = (6, 1, 1 << 60, 1, 1)  # an allocation of a plan, of float32


@pytest.mark.parametrize("failing", ["forward", "backward"])
def test_a_repeated_call_without_memory_for_its_plan_is_made_in_python(failing):
    call, make = known()
    expected = both(call, make(seed=4))
    (shortcut,) = op.shortcuts._known.values()
    tensors, entry, results = [*make(seed=4)], shortcut.entry, 2
    if failing == "backward":
        (entry,) = shortcut.backwards.values()
        out, lse = call(*tensors, return_lse=True)
        tensors, results = [torch.zeros_like(expected[1]), *tensors, out, lse], 1
    torch.ops.crate_kernels_C.plan_forget()
    words = [results, *TOO_LARGE * results, 0, 0, results, *range(len(tensors), len(tensors) + results)]
    torch.ops.crate_kernels_C.plan_store(tensors, entry.number, words)
    for _ in range(3):
        found = both(call, make(seed=4))
        assert [same_bits(a, b) for a, b in zip(found, expected, strict=True)] == [True, True]


def test_calls_that_are_remembered_are_bounded():
    (w,) = inputs("mssa")
    for n in range(10_000):
        op.shortcuts.remember((n,), (w,), MSSACall(scale=1.0 + n), "cpp")
    assert 0 < len(op.shortcuts._known) <= 4096
    assert 0 < len(op.shortcuts._planned._entries) <= 4096


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
    if testing.SPECS[case.op].excluded(case, "cpp", torch.float32) is not None:
        pytest.skip("needs a kernel of cpp for this case")
    refused, words = [], recording.Recorder.words

    def noted(self, results):
        try:
            return words(self, results)
        except launches.Unplannable as reason:
            refused.append(str(reason))
            raise

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording.Recorder, "words", noted)
        for _ in range(2):
            inputs = leaves(case)
            try:
                result = getattr(ck, case.op)(**inputs.differentiable, **inputs.others, **case.options, backend="cpp")
            except NotImplementedError:
                pytest.skip("needs a kernel of cpp for this case")
            first = result[0] if isinstance(result, tuple) else result
            torch.autograd.grad(first.sum(), list(inputs.differentiable.values()), allow_unused=True)
    assert refused == []


def test_plans_of_a_forced_configuration_end_with_it():
    call, make = known()
    with torch.no_grad():
        with table.forced(table.Table("none", {}), {}):
            assert [hits(lambda: call(*make()))[0] for _ in range(3)] == [0, 0, 1]
        assert hits(lambda: call(*make()))[0] == 0
