"""Who takes the persistent and the walking kernels, under the emulator, and what tuning times."""

import bisect
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from crate_kernels import TokenStatsCache, tssa
from crate_kernels._cuda.launch import Shape
from crate_kernels._triton import table, tune
from crate_kernels._triton.table import LaunchRow
from crate_kernels.cli.tune import judge
from crate_kernels.ops.tssa import op, timed
from crate_kernels.ops.tssa.call import TSSACall
from crate_kernels.ops.tssa.cuda import persistent, walking
from tests.ops.common import outputs_and_gradients
from tests.ops.tssa.common import bias, call, halves, temps, tokens
from tests.ops.tssa.persistent import MAX_SHARED, PAIRS, TWICE, Persistent
from tests.ops.tssa.walking import BACK, EIGHT, Walking
from tests.ops.tssa.walking import PAIRS as WALKS
from tests.tools.emulator import emulated
from tests.tools.emulator.fixtures import ROOT

EXHAUSTIVE = pytest.mark.exhaustive
GPU = {"capability": 90, "shared_limit": MAX_SHARED, "multiprocessors": 4}
DIRECTIONS = pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
FORWARD, BACKWARD = Persistent.kernels
USUAL_FORWARD, USUAL_BACKWARD = "tssa_full_fwd_resident_kernel", "tssa_full_bwd_resident_kernel"


@pytest.fixture
def launched(device, library):
    """Emulate a Hopper GPU; return what says which kernels were launched since its last call: full or walking ones."""
    device(**GPU)

    def names():
        return {*re.findall(r"(tssa_(?:full_\w+|\w+_walking)_kernel)\b", library.emulated_launches())}

    names()
    return names


def usual(kind, batch=2):
    """Return w, temp and what else a call of a kind has."""
    if kind.causal:
        return halves(batch, 3, 90, 32), temps(3), bias(3, 90)  # two steps
    return halves(batch, 3, 30, 16), temps(3)


def test_nothing_takes_them_by_default(launched, backend):
    outputs_and_gradients(call(False, backend), *usual(Persistent))
    assert launched() == {USUAL_FORWARD, USUAL_BACKWARD}
    outputs_and_gradients(call(True, backend), *usual(Walking))
    assert launched() == set()


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        pytest.param(Persistent, PAIRS, id="alone"),
        pytest.param(Persistent, TWICE, id="together", marks=EXHAUSTIVE),
        pytest.param(Walking, WALKS, id="walking"),
    ],
)
def test_where_they_are_chosen_they_are_launched_and_repeated(kind, config, launched, backend, repeated_calls):
    inputs = usual(kind, batch=4)
    with kind.taking(config):
        first = outputs_and_gradients(call(kind.causal, backend), *inputs)
        assert launched() == {*kind.kernels}
        again = outputs_and_gradients(call(kind.causal, backend), *inputs)
    assert all(map(torch.equal, first, again))
    if repeated_calls is None:
        pytest.skip("needs the C++ extension, which repeats calls: python -m crate_kernels build")
    assert repeated_calls.refused == []


@DIRECTIONS
def test_a_direction_is_taken_by_itself(backward, launched, backend):
    with table.forced(persistent.BACKWARD if backward else persistent.FORWARD, PAIRS):
        outputs_and_gradients(call(False, backend), *usual(Persistent))
    assert launched() == ({USUAL_FORWARD, BACKWARD} if backward else {FORWARD, USUAL_BACKWARD})


def unaligned(w):
    return torch.nn.functional.pad(w, (1, 15))[..., 1 : w.shape[-1] + 1]


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
    "unaligned": ((2, 3, 30, 16), {"strides": unaligned}),
    "tokens-and-heads-apart": ((2, 3, 30, 16), {"strides": lambda w: torch.cat([w, w], -1)[..., :16]}),
}
# The same, and the configuration, of the walking kernels.
OTHER_WALKS = {
    "older-gpu": ((2, 3, 30, 32), {"capability": 80}),
    "newer-gpu": ((2, 3, 30, 32), {"capability": 100}),
    "fp32": ((2, 3, 30, 32), {"dtype": torch.float32}),
    "24-channels": ((2, 3, 30, 24), {}),
    "no-tokens": ((2, 3, 0, 32), {}),
    "no-sequences": ((0, 3, 30, 32), {}),
    "few-sequences": ((2, 3, 30, 32), {"multiprocessors": 9}),
    "little-shared-memory": ((2, 3, 30, 32), {"shared_limit": 9 * 1024}),
    "many-threads": ((2, 3, 30, 32), {"config": {**WALKS, "THREADS": 513}}),
    "no-such-cluster": ((2, 3, 30, 32), {"multiprocessors": 1}),
    "unaligned": ((2, 3, 30, 32), {"strides": unaligned}),
}


@pytest.mark.parametrize(
    ("kind", "shape", "options"),
    [
        *(pytest.param(Persistent, *other, id=f"persistent-{name}") for name, other in OTHERS.items()),
        *(pytest.param(Walking, *other, id=f"walking-{name}") for name, other in OTHER_WALKS.items()),
    ],
)
def test_other_calls_are_left_to_other_kernels(kind, shape, options, launched, device, backend):
    options = {"config": WALKS if kind.causal else PAIRS, "dtype": torch.bfloat16, "strides": lambda w: w, **options}
    config, dtype, strides = (options.pop(name) for name in ("config", "dtype", "strides"))
    device(**{**GPU, "shared_limit": MAX_SHARED if kind.causal else 64 * 1024, **options})
    w, temp = strides(tokens(*shape, dtype=dtype)), temps(shape[1])
    with kind.taking(config):
        outputs_and_gradients(call(kind.causal, backend), w, temp)
        tssa(w, temp, causal=True, backend=backend)
    assert launched().isdisjoint(kind.kernels)


@pytest.mark.parametrize(
    ("config", "multiprocessors"),
    [pytest.param(PAIRS, 1, id="cluster"), pytest.param(TWICE, 3, id="clusters", marks=EXHAUSTIVE)],
)
def test_a_gpu_that_holds_too_few_blocks_is_left_to_other_kernels(config, multiprocessors, launched, device, backend):
    """Clusters that share a sequence would wait for each other forever."""
    device(**{**GPU, "multiprocessors": multiprocessors})
    with Persistent.taking(config):
        outputs_and_gradients(call(False, backend), *usual(Persistent))
    assert launched().isdisjoint(Persistent.kernels)


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


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize(("seqlen", "steps"), [(80, 1), (81, 2), (190, 3)])
@pytest.mark.parametrize("saves", [True, False], ids=["saved", "found"])
def test_there_are_sums_before_each_step_but_the_first(seqlen, steps, saves, backend, monkeypatch):
    """Pi w^2 and w^2 by channel, and Pi by head, in fours; of each sequence."""
    sizes, empty = [], TSSACall.empty_sums
    monkeypatch.setattr(
        TSSACall, "empty_sums", lambda call, w: (found := empty(call, w), sizes.append(found.numel()))[0]
    )
    with Walking.taking(WALKS):
        inputs, options = (halves(3, 3, seqlen, 32), temps(3), None), TSSACall(sums_every=80 if saves else 0)
        out, *saved = op.tssa_causal_fwd(*inputs, *options, backend)
        op.tssa_causal_bwd(out, None, *inputs, *saved, *options, backend)
    places = 3 * (steps - 1) * (96 + 4 + 96)
    # For one step the backward asks for its tensors, of which there are none.
    assert sizes == ([places] + [0] * (steps == 1) if saves else [0, places])


@pytest.mark.parametrize(
    ("kind", "config", "others"),
    [(Persistent, PAIRS, {"tssa_full_bwd_chunk_kernel"}), (Walking, WALKS, set())],
    ids=["persistent", "walking"],
)
def test_a_gradient_that_is_expanded_is_left_to_other_kernels(kind, config, others, launched, backend):
    w, temp, *_ = usual(kind)
    with kind.taking(config):
        call(kind.causal, backend)(w.requires_grad_(), temp)[0].sum().backward()
    assert launched() == {kind.kernels[0], *others}


def test_the_full_form_and_a_cache_are_left_to_other_kernels(launched, backend):
    with Walking.taking(WALKS):
        call(False, backend)(halves(2, 3, 30, 32), temps(3))
        call(True, backend, cache=TokenStatsCache(2, 3, 32))(halves(2, 3, 70, 32), temps(3))
    assert launched().isdisjoint(Walking.kernels)


def test_statistics_that_no_bulk_copy_brings_are_left_to_other_kernels(launched, backend):
    (w, temp), options = usual(Persistent), (None, None, 0, None, 0.0, 0)
    _, *saved = op.tssa_fwd(w, temp, *options, backend)
    apart = torch.cat([saved[2].new_zeros(1), saved[2].flatten()])[1:].view_as(saved[2])
    with Persistent.taking(PAIRS):
        expected = op.tssa_bwd(w, None, w, temp, *saved, *options, backend)
        assert BACKWARD in launched()
        found = op.tssa_bwd(w, None, w, temp, *saved[:2], apart, *options, backend)
    assert BACKWARD not in launched()
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("kind", "config", "tables", "sizes", "buckets"),
    [
        (Persistent, PAIRS, (persistent.FORWARD, persistent.BACKWARD), (3, 16, 30), (48, 32)),
        pytest.param(*(Walking, WALKS, (walking.FORWARD, walking.BACKWARD), (3, 32, 70), (96, 128)), marks=EXHAUSTIVE),
    ],
    ids=["persistent", "walking"],
)
@DIRECTIONS
def test_tuning_times_them(kind, config, tables, sizes, buckets, backward, launched, monkeypatch):
    nheads, head_dim, seqlen = sizes
    monkeypatch.setattr(timed, "_ELEMENTS", 2 * seqlen * nheads * head_dim)
    make, of, times = timed.whole(emulated.on_cuda("tssa"), *sizes, kind.causal, backward, "cpu"), tables[backward], []

    def clock(run):
        launched()
        run()
        times.append(kind.kernels[backward] in launched())
        return 1.0 / len(times)

    few = tune.Workload(replace(of, candidates=(config,)), LaunchRow({}, *buckets, half=True), make)
    shipped = of.shipped(torch.device("cpu"), *buckets, kind.causal, torch.float16)
    assert tune.search(few, shipped, clock, judge).config == config
    assert times == [False, True]


@pytest.mark.parametrize(("nheads", "head_dim"), [(4, 48), (8, 48), (16, 48), (8, 64), (12, 64)], ids=str)
@DIRECTIONS
def test_published_sizes_have_candidates_that_fit(nheads, head_dim, backward):
    def fitting(seqlen, max_size):
        return sum(
            persistent.shared_bytes(nheads, head_dim, seqlen, backward, config) <= MAX_SHARED
            for config in persistent.FORWARD.candidates
            if config["CLUSTER"] * config["TOGETHER"] <= max_size
        )

    assert fitting(196, 8) >= 6
    # Of both w and dout, eight blocks hold less.
    assert [fitting(n, 8) > 0 for n in (784, 1024)] == [not backward or nheads * head_dim <= n for n in (512, 384)]
    assert fitting(4096, 96) > 0


def longest(nheads, head_dim, backward, fits):
    """Return the longest sequence that a candidate of which ``fits`` is true holds."""
    some = [c for c in persistent.FORWARD.candidates if fits(c)]

    def fits_memory(seqlen):
        return any(persistent.shared_bytes(nheads, head_dim, seqlen, backward, c) <= MAX_SHARED for c in some)

    return bisect.bisect_left(range(1, 1 << 16), True, key=lambda seqlen: not fits_memory(seqlen))


# nheads, head_dim: rows of the table in docs/cuda.md, by clusters of up to 8 blocks, of 16, and all.
WAYS = (
    lambda c: c["CLUSTER"] <= 8 and c["TOGETHER"] == 1,
    lambda c: c["TOGETHER"] == 1,
    lambda c: c["CLUSTER"] <= 8,
)


@pytest.mark.parametrize(("nheads", "head_dim"), [(4, 48), (8, 48), (8, 64), (16, 48)], ids=str)
def test_the_longest_sequences_are_those_of_the_docs(nheads, head_dim):
    cells = [
        re.sub(r"\d{5,}", lambda n: f"{int(n[0]):,}", " / ".join(map(str, both)))
        for both in ([longest(nheads, head_dim, backward, fits) for backward in (False, True)] for fits in WAYS)
    ]
    assert f"| {nheads * head_dim} | {' | '.join(cells)} |" in (ROOT / "docs/cuda.md").read_text()


@DIRECTIONS
@pytest.mark.parametrize(("nheads", "head_dim"), [(12, 64), (16, 64), (20, 64)], ids=str)
def test_published_sizes_of_the_causal_form_have_candidates_that_fit(nheads, head_dim, backward):
    candidates = (walking.BACKWARD if backward else walking.FORWARD).candidates
    assert (BACK if backward else EIGHT) in candidates
    fitting = [one for one in candidates if walking.shared_bytes(nheads, head_dim, backward, one) <= MAX_SHARED]
    width = nheads * head_dim
    assert sum(walking.threads_of(width, one["THREADS"]) <= walking.MAX_THREADS for one in fitting) >= 4
