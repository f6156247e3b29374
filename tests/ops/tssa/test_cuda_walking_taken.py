"""Who takes the walking kernels of the causal form, under the emulator, and what tuning times."""

import re
from dataclasses import replace

import pytest
import torch

from crate_kernels import TokenStatsCache
from crate_kernels._triton import tune
from crate_kernels._triton.table import LaunchRow
from crate_kernels.cli.tune import judge
from crate_kernels.ops.tssa import timed
from crate_kernels.ops.tssa.cuda import walking
from tests.ops.common import outputs_and_gradients
from tests.ops.tssa.cuda import bias, call, temps, tokens
from tests.ops.tssa.persistent import MOST_SHARED
from tests.ops.tssa.walking import BACK, EIGHT, PAIRS, taking
from tests.tools.emulator import emulated


@pytest.fixture
def hopper(device, library):
    """Emulate a Hopper GPU; return a function that says if walking kernels were launched since it was last called."""
    device(capability=90, shared_limit=MOST_SHARED, multiprocessors=4)

    def walked():
        return {*re.findall(r"tssa_\w+_walking_kernel\b", library.emulated_launches())}

    walked()
    return walked


def halves(*shape):
    return tokens(*shape, dtype=torch.bfloat16)


def test_nothing_takes_them_by_default(hopper, backend):
    outputs_and_gradients(call(True, backend), halves(2, 3, 70, 32), temps(3), bias(3, 70))
    assert hopper() == set()


def test_where_they_are_chosen_they_are_launched_and_repeated(hopper, backend, repeated_calls):
    inputs = halves(2, 3, 70, 32), temps(3), bias(3, 70)
    with taking(PAIRS):
        first = outputs_and_gradients(call(True, backend), *inputs)
        assert hopper() == {"tssa_causal_fwd_walking_kernel", "tssa_causal_bwd_walking_kernel"}
        again = outputs_and_gradients(call(True, backend), *inputs)
    assert all(map(torch.equal, first, again))
    if repeated_calls is None:
        pytest.skip("needs the C++ extension, which repeats calls: python -m crate_kernels build")
    assert repeated_calls.refused == []


# name: what of (batch, heads, tokens, channels), dtype, strides, GPU or configuration is other than what they serve
OTHERS = {
    "older-gpu": ((2, 3, 30, 32), {"capability": 80}),
    "newer-gpu": ((2, 3, 30, 32), {"capability": 100}),
    "fp32": ((2, 3, 30, 32), {"dtype": torch.float32}),
    "24-channels": ((2, 3, 30, 24), {}),
    "no-tokens": ((2, 3, 0, 32), {}),
    "no-sequences": ((0, 3, 30, 32), {}),
    "few-sequences": ((2, 3, 30, 32), {"multiprocessors": 9}),
    "little-shared-memory": ((2, 3, 30, 32), {"shared_limit": 9 * 1024}),
    "many-threads": ((2, 3, 30, 32), {"config": {**PAIRS, "THREADS": 513}}),
    "no-such-cluster": ((2, 3, 30, 32), {"multiprocessors": 1}),
    "unaligned": ((2, 3, 30, 32), {"strides": lambda w: torch.nn.functional.pad(w, (1, 7))[..., 1:33]}),
}


@pytest.mark.parametrize(("shape", "given"), OTHERS.values(), ids=OTHERS)
def test_other_calls_are_left_to_other_kernels(shape, given, hopper, device, backend):
    given = dict(given)
    config, dtype = given.pop("config", PAIRS), given.pop("dtype", torch.bfloat16)
    strides = given.pop("strides", lambda w: w)
    device(**{"capability": 90, "shared_limit": MOST_SHARED, "multiprocessors": 4, **given})
    with taking(config):
        outputs_and_gradients(call(True, backend), strides(tokens(*shape, dtype=dtype)), temps(shape[1]))
    assert hopper() == set()


def test_a_gradient_that_is_expanded_is_left_to_other_kernels(hopper, backend):
    w = halves(2, 3, 70, 32).requires_grad_()
    with taking(PAIRS):
        call(True, backend)(w, temps(3))[0].sum().backward()
    assert hopper() == {"tssa_causal_fwd_walking_kernel"}


def test_the_full_form_and_a_cache_are_left_to_other_kernels(hopper, backend):
    with taking(PAIRS):
        call(False, backend)(halves(2, 3, 30, 32), temps(3))
        call(True, backend, cache=TokenStatsCache(2, 3, 32))(halves(2, 3, 70, 32), temps(3))
    assert hopper() == set()


@pytest.mark.exhaustive
@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "backward"])
def test_tuning_times_them(gradient, hopper, monkeypatch):
    monkeypatch.setattr(timed, "_ELEMENTS", 2 * 70 * 96)
    of, direction = (walking.BACKWARD, "bwd") if gradient else (walking.FORWARD, "fwd")
    make, times = timed.whole(emulated.on_cuda("tssa"), 3, 32, 70, True, gradient, "cpu"), []

    def clock(run):
        hopper()
        run()
        times.append(f"tssa_causal_{direction}_walking_kernel" in hopper())
        return 1.0 / len(times)

    few = tune.Workload(replace(of, candidates=(PAIRS,)), LaunchRow({}, 96, 128, half=True), make)
    shipped = of.shipped(torch.device("cpu"), 96, 128, True, torch.float16)
    assert tune.search(few, shipped, clock, judge).config == PAIRS
    assert times == [False, True]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("nheads", "head_dim"), [(12, 64), (16, 64), (20, 64)], ids=str)
def test_published_sizes_have_candidates_that_fit(nheads, head_dim, backward):
    candidates = (walking.BACKWARD if backward else walking.FORWARD).candidates
    assert (BACK if backward else EIGHT) in candidates
    fitting = [one for one in candidates if walking.shared_bytes(nheads, head_dim, backward, one) <= MOST_SHARED]
    width = nheads * head_dim
    assert sum(walking.threads_of(width, one["THREADS"]) <= walking.MOST_THREADS for one in fitting) >= 4
