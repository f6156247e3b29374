"""Plans below the operators: what C++ accepts, what it launches, and what it does when a step fails."""

import ctypes
import gc
import itertools
import os
import signal
import struct
import threading
import weakref

import pytest
import torch

from crate_kernels._core import launches, plan, recording
from crate_kernels._native import extension
from tests.tools.plans import drivers, standin
from tests.tools.plans.recorded import launching, recorded

pytestmark = pytest.mark.skipif(extension.PATH is None, reason="needs python -m crate_kernels build")
NUMBER = 10**9  # of options that no operator has


@pytest.fixture(autouse=True)
def empty():
    standin.drive()  # CUDA's driver
    yield
    standin.rest()


def ops():
    return torch.ops.crate_kernels_C


BODIES = {
    "sum": lambda a, b: torch.ops.aten.sum.dim_IntList(a, [0]),
    "addition": lambda a, b: torch.add(a, b, alpha=0.5),
    "addition-of-two-dtypes": lambda a, b: torch.add(a.bfloat16(), b, alpha=0.5),
    "difference-of-two-dtypes": lambda a, b: a - b.to(torch.float16),
    "addition-in-place": lambda a, b: a.clone().add_(b, alpha=0.5),
    "difference": lambda a, b: torch.sub(a, b, alpha=0.5),
    "difference-in-place": lambda a, b: a.clone().sub_(b, alpha=0.5),
    "product": lambda a, b: a @ b.t(),
    "product-into-another": lambda a, b: torch.mm(a, b, out=a.new_empty(4, 4)),
    "scaled-product": lambda a, b: torch.addmm(a, b, b.t() @ a, beta=0.5, alpha=2),
    "scaled-product-in-place": lambda a, b: a.clone().addmm_(b, b, beta=0.5, alpha=2),
    "scaled-product-into-another": lambda a, b: torch.addmm(a, b, b, beta=0.5, alpha=2, out=a.new_empty(4, 4)),
    "scaled": lambda a, b: (a + b) * 3,
    "scaled-in-place": lambda a, b: (a + b).mul_(3),
    "copy-in-another-dtype": lambda a, b: a.to(torch.bfloat16),
    "copy-into-another": lambda a, b: a.new_empty(4, 4).copy_(b),
    "zeros": lambda a, b: a.new_zeros(3, 2),
    "zeros-in-place": lambda a, b: (a + b).zero_(),
    "cat": lambda a, b: torch.cat((a, b), 1),
    "cat-of-rows": lambda a, b: torch.cat((a, b[:3])),
    "views": lambda a, b: (a[1:] + b[:3], b.view(2, 8)[:, 3:].contiguous()),
    "view-of-a-sum": lambda a, b: torch.ops.aten.sum.dim_IntList(a, [1])[1:].to(torch.float16),
    "result-that-is-a-view": lambda a, b: (a + b).t(),
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_what_pytorch_computes_is_repeated_bit_for_bit(body):
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    words = recorded(body, a, b)
    ops().plan_store([a, b], NUMBER, words)
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    expected = body(a, b)
    expected = expected if isinstance(expected, tuple) else (expected,)
    found = getattr(ops(), f"plan_2_{len(expected)}")(a, b, NUMBER)
    found = found if isinstance(found, (tuple, list)) else (found,)
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.stride()) == (other.shape, other.stride())
        assert torch.equal(one, other)


def test_the_first_results_alone_are_returned_of_a_plan():
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    ops().plan_store([a, b], NUMBER, recorded(BODIES["views"], a, b))
    assert torch.equal(ops().plan_2_1(a, b, NUMBER), a[1:] + b[:3])
    assert ops().plan_2_3(a, b, NUMBER) == (None, None, None)


REFUSED = {
    "a-value": lambda a: a * float(a.sum()),
    "another-tensor": lambda a: a + _CONSTANT,
    "an-operator": torch.sin,
    "a-promotion-in-place": lambda a: a.bfloat16().add_(a),
    "a-sum-of-16-bits": lambda a: torch.ops.aten.sum.dim_IntList(a.bfloat16(), [0]),  # float32 by autocast on GPUs
    "itself": lambda a: a,
    "another-type-of-view": lambda a: a.view(torch.int32) + a.view(torch.int32),
}
_CONSTANT = torch.ones(4, 4)


@pytest.mark.parametrize("body", REFUSED.values(), ids=REFUSED)
def test_what_no_plan_repeats_is_refused(body):
    with pytest.raises(launches.Unplannable):
        recorded(body, torch.randn(4, 4))


def test_a_failed_recording_changes_no_result():
    a = torch.randn(4, 4)
    entry = plan.Entry(1, 1)
    for _ in range(20):
        torch.testing.assert_close(entry.record([a], lambda: torch.sin(a)), a.sin(), rtol=0, atol=0)
    assert len(entry.failed) == 1


OTHER_KINDS = {"sizes": torch.ones(3, 4), "dtype": torch.ones(3, 3).double(), "strides": torch.ones(3, 3).t()}


@pytest.mark.parametrize("other", OTHER_KINDS.values(), ids=OTHER_KINDS)
def test_a_kind_of_tensors_that_leaves_no_plan_keeps_no_other_from_its_own(other):
    entry, a = plan.Entry(1, 1), torch.ones(3, 3)
    for _ in range(3):
        entry.record([a], lambda: torch.sin(a))
        entry.record([other], lambda: other + other)
    assert torch.equal(entry.run(other, entry.number), other + other)


def test_kinds_of_calls_that_leave_no_plan_do_not_keep_others_from_theirs():
    entry = plan.Entry(1, 1)
    for size in range(3, 3 + 2 * plan._MAX_FAILURES):
        a, b = torch.randn(size), torch.randn(2)
        for _ in range(3):
            entry.record([a], lambda a=a: torch.sin(a))
        if size < 3 + plan._MAX_FAILURES:
            entry.record([b], lambda b=b: b + b)
    assert torch.equal(entry.run(b, entry.number), b + b)
    assert len(entry.failed) == plan._MAX_FAILURES


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "ends early"),
        ([1, 6, 1], "ends early"),
        ([0, 0, 0, 1, 7], "a register must be from 0 to 0, got 7"),
        ([1, 6, 1, 4, 1, 1, 0, 1, 0, 0, 3, *b"abc", 1, 0, 9, 1, 1], "a register must be from 0 to 1, got 9"),
        ([1, 6, 1, 4, 1, 1, 0, 1, 0, 0, 3, *b"abc", 1, 1, 9, 1, 1], "a register must be from 0 to 1, got 9"),
        ([0, 0, 0, 1, 0, 9], "numbers after its end"),
        ([1, 6, 1, 4, 2, 1, 1, 0, 0, 0], "1 sizes and 2 strides"),
        ([0, 0, 1, 0, 99, 0], "the kind of an operation"),
        ([0, 0, 1, 0, 2, 0, 0], "ends early"),
        ([-1], "a count must be"),
        ([70, *[6, 0, 0] * 70, 0, 0, 0], "more than 64"),
        ([0, 0, 1, 1, 1, *[1] * 6, 0, 0, 1, 8, 1, 0, 1, 8, 0, 0], "is at byte 8 of 8"),
        ([0, 0, 1, 1, 1, *[1] * 6, 0, 0, 1, 0, 1, 0, 1, 8, 1, 0, 4, 0, 0], "the byte of an address"),
    ],
)
def test_a_broken_plan_is_refused(words, message):
    with drivers.driving(lambda *_: 0), pytest.raises(RuntimeError, match=message):
        ops().plan_store([torch.zeros(4)], NUMBER, words)


def test_without_memory_there_is_no_plan_and_no_error():
    a = torch.zeros(4)
    ops().plan_store([a], NUMBER, [1, 6, 1, 1 << 60, 1, 1, 0, 0, 1, 1])
    assert ops().plan_1_1(a, NUMBER) is None


def test_an_unknown_kernel_runs_nothing():
    a = torch.zeros(4)
    ops().plan_store([a], NUMBER, [1, 6, 1, 4, 1, 1, 0, 1, 0, 0, 3, *b"abc", 1, 0, 0, 1, 1])
    assert ops().plan_1_1(a, NUMBER) is None


def test_a_kernel_that_raises_leaves_the_call_to_python():
    a = torch.zeros(4)  # no tokens of mssa
    name = b"mssa_fwd"
    arguments = [0, 0, 2, 0, 2, 0, 3, 0, 2, 0, 3, 0, 3, 0, 3, 0, 2, 0, 0, 1, 0, 1]
    ops().plan_store([a], NUMBER, [1, 6, 1, 4, 1, 1, 0, 1, 0, 0, len(name), *name, 11, *arguments, 1, 1])
    assert ops().plan_1_1(a, NUMBER) is None


def test_plans_are_bounded():
    words = [1, 6, 0, 0, 0, 0, 1, 1]
    for number in range(10_000):
        ops().plan_store([torch.empty(1 + number)], NUMBER, words)
    assert 0 < plan.counts()[2] <= 4096


def test_calls_that_lack_another_tensor_have_other_entries():
    """Of two tensors that a call may leave out, both may be of one kind: masks of rows and of columns."""
    planned, a, b = plan.Planned([0, 1, 2], 4, 1, lambda name, of: True), torch.zeros(2), torch.ones(2)
    found = [planned.entry((a, *rest, "x"))[0] for rest in ((b, None), (None, b), (b, b), (None, None))]
    assert len({entry.number for entry in found}) == 4
    assert planned.entry((a, None, b, "x"))[0] is found[1]


def test_entries_are_bounded():
    schema = torch._C.parse_schema("t::f(Tensor a, int n, str backend) -> Tensor")
    planned = plan.Planned([0], len(schema.arguments), 1, lambda name, of: True)
    for n in range(10_000):
        planned.entry((torch.zeros(1), n, "x"))
    assert len(planned._entries) <= plan._MAX_ENTRIES


# ---- Launches. ----


class Config(ctypes.Structure):
    """CUlaunchConfig, as cuda.h has it."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


class Attribute(ctypes.Structure):
    """CUlaunchAttribute, as cuda.h has it."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


@pytest.mark.parametrize(
    ("changed", "grid", "attributes"),
    [
        ({}, (2, 3, 4), {}),
        ({"ctas": 4}, (8, 3, 4), {4: (4, 1, 1), 5: (1,)}),
        ({"cooperative": True}, (2, 3, 4), {2: (1,)}),
        ({"serialized": True, "ctas": 2}, (4, 3, 4), {6: (1,), 4: (2, 1, 1), 5: (1,)}),
    ],
    ids=["plain", "cluster", "cooperative", "serialized-cluster"],
)
def test_a_launch_is_what_was_recorded(changed, grid, attributes):
    seen = []

    def run(config, function, parameters):
        c = Config.from_address(config)
        found = [Attribute.from_address(c.attributes + 72 * i) for i in range(c.count)]
        numbers = [ctypes.string_at(parameters[i], 8) for i in (0, 1, 3)]
        seen.append((function, tuple(c.grid), tuple(c.block), c.shared, c.stream))
        assert {a.id: tuple(a.value[: len(attributes[a.id])]) for a in found} == attributes
        assert struct.unpack("<i", ctypes.string_at(parameters[2], 4)) == (7,)
        addresses.append([struct.unpack("<Q", n)[0] for n in numbers])

    addresses = []
    with drivers.driving(run, sizes={5: [8, 8, 4, 8]}):
        a = torch.randn(4, 4)
        ops().plan_store([a], NUMBER, recorded(lambda t: launching(t, **changed), a))
        a = torch.randn(4, 4)
        out = ops().plan_1_1(a, NUMBER)
    assert seen == [(5, grid, (128, 1, 1), 96, None)]
    assert addresses == [[a.data_ptr(), out.data_ptr(), 0]]


def test_scratch_memory_is_one_allocation_and_aligned():
    addresses = []

    def run(config, function, parameters):
        addresses.append(struct.unpack("<Q", ctypes.string_at(parameters[3], 8))[0])

    def body(t):
        launching(t, scratch=True)
        return launching(t, scratch=True)

    with drivers.driving(run):
        a = torch.randn(4, 4)
        words = recorded(body, a)
        assert words[0] == 1, "the result alone is a separate tensor"
        ops().plan_store([a], NUMBER, words)
        ops().plan_1_1(a, NUMBER)
    first, second = addresses
    assert abs(second - first) in (512, 1024)
    assert (second - first) % 512 == 0


@pytest.mark.parametrize("bytes_left", [0, 63], ids=["freed", "cut"])
def test_a_tensor_without_its_memory_is_not_launched_on(bytes_left):
    seen = []
    with drivers.driving(lambda *_: seen.append(1)):
        a = torch.randn(4, 4)
        ops().plan_store([a], NUMBER, recorded(launching, a))
        assert ops().plan_1_1(a, NUMBER) is not None
        a.untyped_storage().resize_(bytes_left)
        assert ops().plan_1_1(a, NUMBER) is None
    assert seen == [1]


@pytest.mark.parametrize("sizes", [[8, 8, 4], [8, 8, 4, 8, 8], [8, 8, 8, 8]], ids=["fewer", "more", "wider"])
def test_parameters_that_the_driver_does_not_know_are_refused(sizes):
    with drivers.driving(lambda *_: 0, sizes={5: sizes}):
        a = torch.randn(4, 4)
        with pytest.raises(RuntimeError, match="parameter"):
            ops().plan_store([a], NUMBER, recorded(launching, a))


@pytest.mark.parametrize("sizes", [[8, 8, 4, 8], [8, 8, 4]], ids=["as-recorded", "another-struct"])
def test_a_call_whose_launch_is_refused_stays_in_python(sizes):
    def call(t):
        found = entry.run(t, entry.number)
        return entry.record([t], lambda: launching(t)) if found is None else found

    launched = []
    with drivers.driving(lambda *_: launched.append(1), sizes={5: sizes}):
        entry = plan.Entry(1, 1)
        for _ in range(4):
            assert call(torch.randn(4, 4)).shape == (4, 4)
    fits = len(sizes) == 4
    assert (len(launched), len(entry.failed), plan.counts()[2]) == ((2, 0, 0) if fits else (0, 1, 0))


def test_a_launch_that_fails_leaves_the_call_to_python():
    with drivers.driving(lambda *_: drivers.FAILED):
        a = torch.randn(4, 4)
        ops().plan_store([a], NUMBER, recorded(launching, a))
        assert ops().plan_1_1(a, NUMBER) is None


def test_an_empty_grid_is_not_launched():
    seen = []
    with drivers.driving(lambda *_: seen.append(1)):
        a = torch.randn(4, 4)
        ops().plan_store([a], NUMBER, recorded(lambda t: launching(t, grid=(0, 1, 1)), a))
        assert ops().plan_1_1(a, NUMBER) is not None
    assert seen == []


def test_what_a_plan_launches_lives_as_long_as_the_process(monkeypatch):
    """A plan has the address of a function; what loaded it may have no other user by then."""

    class Owner:
        pass

    def record():
        owner = Owner()
        recorded(lambda a: launching(a, owner=owner), torch.ones(4))
        return weakref.ref(owner)

    monkeypatch.setattr(recording, "_alive", {})
    owner = record()
    gc.collect()
    assert owner() is not None
    assert recording._alive == {5: owner()}


def test_without_a_driver_a_launch_is_refused():
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    a = torch.randn(4, 4)
    with pytest.raises(RuntimeError, match="no CUDA driver"):
        ops().plan_store([a], NUMBER, recorded(launching, a))


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_child_forked_while_others_look_for_plans_finds_its_own():
    a, stop = torch.ones(4), threading.Event()

    def look():
        for number in itertools.cycle(range(NUMBER, NUMBER + 50_000)):
            ops().plan_meet([a], number)
            if stop.is_set():
                return

    others = [threading.Thread(target=look) for _ in range(3)]
    for thread in others:
        thread.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                signal.alarm(5)  # ends a child that waits
                ops().plan_meet([a], NUMBER)
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        stop.set()
        for thread in others:
            thread.join()


def test_nothing_is_repeated_while_launches_are_watched(monkeypatch):
    monkeypatch.setattr(plan, "_is_watched", lambda: True)
    assert plan.is_off()
