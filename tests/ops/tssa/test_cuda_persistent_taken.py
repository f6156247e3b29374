"""Who takes the persistent kernels of the full form, under the emulator, and what tuning times."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from crate_kernels import tssa
from crate_kernels._cuda.launch import Shape
from crate_kernels._triton import table, tune
from crate_kernels._triton.table import LaunchRow
from crate_kernels.cli.tune import judge
from crate_kernels.ops.tssa import op, timed
from crate_kernels.ops.tssa.cuda import persistent, walking
from crate_kernels.ops.tssa.cuda import tune as persistent_tune
from tests.ops.common import outputs_and_gradients
from tests.ops.tssa.cuda import call, temps, tokens
from tests.ops.tssa.persistent import MOST_SHARED, PAIRS, TWICE, taking
from tests.tools.emulator import emulated


@pytest.fixture
def hopper(device, library):
    """Emulate a Hopper GPU; return a function that says which kernels were launched since it was last called."""
    device(capability=90, shared_limit=MOST_SHARED, multiprocessors=4)

    def launched():
        return {*re.findall(r"tssa_full_(\w+)_kernel\b", library.emulated_launches())}

    launched()
    return launched


def halves(*shape, seed=0):
    return tokens(*shape, dtype=torch.bfloat16, seed=seed)


def test_nothing_takes_them_by_default(hopper, backend):
    outputs_and_gradients(call(False, backend), halves(2, 3, 30, 16), temps(3))
    assert hopper() == {"fwd_resident", "bwd_resident"}


@pytest.mark.parametrize(
    "config", [pytest.param(PAIRS, id="alone"), pytest.param(TWICE, id="together", marks=pytest.mark.exhaustive)]
)
def test_where_they_are_chosen_they_are_launched_and_repeated(config, hopper, backend, repeated_calls):
    inputs = halves(4, 3, 30, 16), temps(3)
    with taking(config):
        first = outputs_and_gradients(call(False, backend), *inputs)
        assert hopper() == {"fwd_persistent", "bwd_persistent"}
        again = outputs_and_gradients(call(False, backend), *inputs)
    assert all(map(torch.equal, first, again))
    if repeated_calls is None:
        pytest.skip("needs the C++ extension, which repeats calls: python -m crate_kernels build")
    assert repeated_calls.refused == []


@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
def test_a_direction_is_taken_by_itself(forward, hopper, backend):
    with table.forced(persistent.FORWARD if forward else persistent.BACKWARD, PAIRS):
        outputs_and_gradients(call(False, backend), halves(2, 3, 30, 16), temps(3))
    assert hopper() == ({"fwd_persistent", "bwd_resident"} if forward else {"fwd_resident", "bwd_persistent"})


# name: what of (batch, heads, tokens, channels), dtype, strides or GPU is other than what they serve
OTHERS = {
    "older-gpu": ((2, 3, 30, 16), {"capability": 80}),
    "newer-gpu": ((2, 3, 30, 16), {"capability": 100}),
    "fp32": ((2, 3, 30, 16), {"dtype": torch.float32}),
    "24-channels": ((2, 3, 30, 24), {}),
    "nine-heads": ((2, 9, 30, 16), {}),  # of a lane
    "no-tokens": ((2, 3, 0, 16), {}),
    "long": ((1, 3, 3000, 16), {}),
    "channels-apart": ((2, 3, 30, 16), {"strides": lambda w: w.transpose(2, 3).contiguous().transpose(2, 3)}),
    "unaligned": ((2, 3, 30, 16), {"strides": lambda w: torch.nn.functional.pad(w, (1, 15))[..., 1:17]}),
    "tokens-and-heads-apart": ((2, 3, 30, 16), {"strides": lambda w: torch.cat([w, w], -1)[..., :16]}),
}


@pytest.mark.parametrize(("shape", "given"), OTHERS.values(), ids=OTHERS)
def test_other_calls_are_left_to_other_kernels(shape, given, hopper, device, backend):
    given = dict(given)
    dtype, strides = given.pop("dtype", torch.bfloat16), given.pop("strides", lambda w: w)
    device(shared_limit=64 * 1024, multiprocessors=4, **{"capability": 90, **given})
    w = strides(tokens(*shape, dtype=dtype))
    with taking(PAIRS):
        outputs_and_gradients(call(False, backend), w, temps(shape[1]))
        tssa(w, temps(shape[1]), causal=True, backend=backend)
    assert not any("persistent" in name for name in hopper())


@pytest.mark.parametrize(
    ("config", "multiprocessors"),
    [pytest.param(PAIRS, 1, id="cluster"), pytest.param(TWICE, 3, id="clusters", marks=pytest.mark.exhaustive)],
)
def test_a_gpu_that_holds_too_few_blocks_is_left_to_other_kernels(config, multiprocessors, hopper, device, backend):
    """Clusters that share a sequence would wait for each other forever."""
    device(capability=90, shared_limit=MOST_SHARED, multiprocessors=multiprocessors)
    with taking(config):
        outputs_and_gradients(call(False, backend), halves(2, 3, 30, 16), temps(3))
    assert not any("persistent" in name for name in hopper())


@pytest.mark.parametrize(
    ("together", "groups", "exchanged", "counters"),
    [(1, 3, 0, 0), (2, 2, 2 * 2 * 2 * 56, 2)],
    ids=["alone", "together"],
)
def test_only_clusters_that_share_a_sequence_wait_for_each_other(together, groups, exchanged, counters, monkeypatch):
    """Each tells twice as many numbers as a token has and heads are, in fours."""
    monkeypatch.setattr(persistent.launch, "function", lambda *_: None)
    sizes, gpu = SimpleNamespace(nsequences=3, width=50, nheads=3), SimpleNamespace(active_clusters=lambda *_: 5)
    found = persistent.resident(sizes, None, None, Shape(0, 128, 1024, 2), torch.device("cpu"), gpu, together)
    assert found.shape == Shape(groups * 2 * together, 128, 1024, 2, cooperative=together > 1)
    assert (found.exchanged, found.counters) == (exchanged, counters)


def test_a_gradient_that_is_expanded_is_left_to_other_kernels(hopper, backend):
    w = halves(2, 3, 30, 16).requires_grad_()
    with taking(PAIRS):
        out, _ = call(False, backend)(w, temps(3))
        out.sum().backward()
    assert hopper() == {"fwd_persistent", "bwd_chunk"}


def test_statistics_that_no_bulk_copy_brings_are_left_to_other_kernels(hopper, backend):
    w, temp, options = halves(2, 3, 30, 16), temps(3), (None, None, 0, None, 0.0)
    _, *saved = op.tssa_fwd(w, temp, *options, backend)
    apart = torch.cat([saved[2].new_zeros(1), saved[2].flatten()])[1:].view_as(saved[2])
    with taking(PAIRS):
        expected = op.tssa_bwd(w, None, w, temp, *saved, *options, backend)
        assert "bwd_persistent" in hopper()
        found = op.tssa_bwd(w, None, w, temp, *saved[:2], apart, *options, backend)
    assert "bwd_persistent" not in hopper()
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "backward"])
def test_tuning_times_them(gradient, hopper, monkeypatch):
    monkeypatch.setattr(timed, "_ELEMENTS", 2 * 30 * 48)
    of = persistent.BACKWARD if gradient else persistent.FORWARD
    make = timed.whole(emulated.on_cuda("tssa"), 3, 16, 30, False, gradient, "cpu")
    direction, times = "bwd" if gradient else "fwd", []

    def clock(run):
        hopper()
        run()
        times.append(f"{direction}_persistent" in hopper())
        return 1.0 / len(times)

    few = tune.Workload(replace(of, candidates=(PAIRS,)), LaunchRow({}, 48, 32, half=True), make)
    shipped = of.shipped(torch.device("cpu"), 48, 32, False, torch.float16)
    assert tune.search(few, shipped, clock, judge).config == PAIRS
    assert times == [False, True]


def test_only_a_gpu_that_has_them_times_them(monkeypatch):
    assert persistent_tune.workloads() == []
    monkeypatch.setattr(persistent_tune.backends, "unavailable_reason", lambda *args: None)
    for capability, count in ((80, 0), (90, 22), (100, 0)):
        monkeypatch.setattr(persistent_tune.launch, "gpu", lambda device, c=capability: SimpleNamespace(capability=c))
        every = persistent_tune.workloads()
        assert len({str(one) for one in every}) == len(every) == count
        assert all(
            one.table in (persistent.FORWARD, persistent.BACKWARD, walking.FORWARD, walking.BACKWARD) for one in every
        )


@pytest.mark.parametrize(("nheads", "head_dim"), [(4, 48), (8, 48), (16, 48), (8, 64), (12, 64)], ids=str)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_published_sizes_have_candidates_that_fit(nheads, head_dim, backward):
    def fitting(seqlen, most):
        return sum(
            persistent.shared_bytes(nheads, head_dim, seqlen, backward, config) <= MOST_SHARED
            for config in persistent.FORWARD.candidates
            if config["CLUSTER"] * config["TOGETHER"] <= most
        )

    assert fitting(196, 8) >= 6
    # Of both w and dout, eight blocks hold less.
    assert [fitting(n, 8) > 0 for n in (784, 1024)] == [not backward or nheads * head_dim <= n for n in (512, 384)]
    assert fitting(4096, 96) > 0
