"""The passes over memory that the docstrings of tssa's and ista's Triton kernels claim, counted element by element."""

import pytest
import torch

from crate_kernels._triton.table import forced
from tests.ops.common import home, kernels, randn

if "triton" not in kernels("tssa") or home("triton") != "cpu":
    pytest.skip("counts what Triton's interpreter does: needs TRITON_INTERPRET=1", allow_module_level=True)

from crate_kernels.ops.ista import call as ista_call
from crate_kernels.ops.ista.triton import launch as ista
from crate_kernels.ops.ista.triton import tables
from crate_kernels.ops.tssa import triton as tssa
from crate_kernels.ops.tssa.call import State, TSSACall
from tests.ops.ista import test_triton as test_triton_ista
from tests.ops.tssa import test_triton as test_triton_tssa  # forces one way of several
from tests.tools.traffic import Traffic

HALF = torch.float16
BATCH, HEADS, SEQLEN, HEAD_DIM = 2, 3, 40, 16  # three chunks of 16, the last of 8
CHUNKS = 3
TOKENS, ROWS = BATCH * SEQLEN * HEADS * HEAD_DIM, BATCH * SEQLEN * HEADS
SUMS = BATCH * HEADS * (HEAD_DIM + 1)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Leave uninitialised memory as it is: to poison it is traffic."""


def heads(seed):
    return randn(BATCH, SEQLEN, HEADS, HEAD_DIM, dtype=HALF, seed=seed).transpose(1, 2)


def full(way):
    w, dout, temp = heads(0), heads(1), torch.ones(HEADS)
    with Traffic() as forward:
        _, *saved = tssa.forward(w, temp, TSSACall())
    with Traffic() as backward:
        tssa.backward(dout, None, w, temp, *saved, TSSACall())
    return forward, backward


def causal(way, bias=None):
    w, dout, temp = heads(0), heads(1), torch.ones(HEADS)
    with Traffic() as forward:
        _, *saved = tssa.forward_causal(w, temp, bias, TSSACall())
    with Traffic() as backward:
        tssa.backward_causal(dout, None, w, temp, bias, *saved, TSSACall())
    return forward, backward


# Passes (read, written) over the tokens, and over one number per token and head; and how often the sums of chunks,
# (head_dim + 1) per chunk and head, are read and written together: in the causal backward in chunks also the marks, one
# per chunk at these sizes, written once and read twice.
FORMS = {
    "full-whole": (full, ((1, 1), (0, 1), 0), ((2, 1), (1, 2), 0)),
    "full-chunks": (full, ((3, 1), (1, 1), 4), ((5, 1), (5, 2), 4)),
    "causal-whole": (causal, ((1, 1), (0, 1), 0), ((8, 1), (8, 2), 14)),
    "causal-chunks": (causal, ((3, 1), (1, 1), 8), ((8, 1), (8, 2), 23)),
    "causal-bias-chunks": (
        lambda way: causal(way, torch.zeros(HEADS, SEQLEN + 3)),
        ((3, 1), (1, 1), 8),
        ((8, 1), (9, 2), 23),
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_triton_tssa_passes_as_often_as_it_says(name):
    call, *claims = FORMS[name]
    way = name.rpartition("-")[2]
    with test_triton_tssa.going(way):
        counted = call(way)
    # Sums of chunks: one tensor per kind, or two kinds in one tensor.
    own = SUMS * (CHUNKS if way == "chunks" else 1)
    for traffic, (tokens, rows, sums) in zip(counted, claims, strict=True):
        assert (traffic.passes(TOKENS), traffic.passes(ROWS)) == (tokens, rows)
        kept = sum(counter[size] for counter in (traffic.read, traffic.written) for size in (own, 2 * own))
        assert kept <= sums * own
        everything = sum(traffic.read.values()) + sum(traffic.written.values())
        # Small besides: energies and moments per sequence, temp, its gradient, the bias.
        assert everything <= sum(tokens) * TOKENS + sum(rows) * ROWS + kept + 12 * SUMS + 12 * HEADS * SEQLEN


def test_triton_decoding_reads_the_state_once():
    w, temp = heads(0)[:, :, :1], torch.ones(HEADS)
    energy, weighted = (torch.rand(BATCH, HEADS, HEAD_DIM) for _ in range(2))
    mass, lengths = torch.rand(BATCH, HEADS), torch.zeros(BATCH, dtype=torch.int32)
    with Traffic() as traffic:
        tssa.decode(w, temp, None, State(energy, weighted, mass, lengths), None)
    assert sum(traffic.launches.values()) == 1
    # Equal sizes: the token, out and both sums by channel; mass and membership.
    assert traffic.passes(BATCH * HEADS * HEAD_DIM) == (3, 3)
    assert traffic.passes(BATCH * HEADS) == (1, 2)
    assert traffic.passes(BATCH) == (1, 1)


DIM, HIDDEN = 32, 96
MANY, FEW = 80, 20  # from 32 tokens on a step is one product forward, from 22 backward


def step(count, need=(True, True)):
    x, dy = (randn(count, DIM, dtype=HALF, seed=seed) for seed in (0, 1))
    weight = randn(DIM, DIM, dtype=HALF, seed=2) / 6
    call = ista_call.ISTACall(0.1, 0.1, True, HALF)
    with Traffic() as forward:
        y = ista.forward(x, weight, call)
    with Traffic() as backward:
        ista.backward(dy, x, weight, y, *need, call)
    return [traffic.passes(count * DIM) for traffic in (forward, backward)]


@pytest.mark.parametrize(
    ("library", "count", "forward", "backward"),
    [
        (0, MANY, (1, 1), (5, 2)),
        (0, FEW, (3, 2), (11, 4)),
        # The product is written and read, and its addend is read a second time.
        (1, MANY, (1 + 2, 1 + 1), (5 + 2, 2 + 1)),
        (1, FEW, (3 + 3, 2 + 2), (11 + 4, 4 + 2)),
    ],
)
def test_triton_ista_passes_as_often_as_it_says(library, count, forward, backward):
    with test_triton_ista.going(library):
        assert step(count) == [forward, backward]


@pytest.mark.parametrize(
    ("count", "need", "backward"),
    [
        (MANY, (True, False), (3, 2)),
        (MANY, (False, True), (4, 1)),
        (FEW, (True, False), (6, 3)),
        (FEW, (False, True), (8, 3)),
    ],
)
def test_triton_ista_spares_what_a_gradient_that_is_not_needed_takes(count, need, backward):
    with test_triton_ista.going(0):
        assert step(count, need)[1] == backward


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_triton_overcomplete_passes_as_often_as_it_says(steps):
    x, dout = (randn(MANY, DIM, dtype=HALF, seed=seed) for seed in (0, 1))
    weight, decoder = (randn(DIM, HIDDEN, dtype=HALF, seed=seed) / 6 for seed in (2, 3))
    call = ista_call.OvercompleteCall(0.1, 0.1, steps)
    with test_triton_ista.going(0):
        with Traffic() as forward:
            _, *saved = ista.forward_overcomplete(x, weight, decoder, True, call)
        with Traffic() as backward:
            ista.backward_overcomplete(dout, x, weight, decoder, *saved, call)
    more, summed = steps - 1, max(steps - 2, 0)
    assert forward.passes(MANY * DIM) == (1 + 2 * more, 1 + more)
    assert forward.passes(MANY * HIDDEN) == (1 + 2 * more, steps)
    # dx begins as the first dr and is added up in the last product's epilogue, or by separate passes if there are more.
    assert backward.passes(MANY * DIM) == (3 + 3 * more + (more > 0) + 2 * summed, steps + summed)
    assert backward.passes(MANY * HIDDEN) == (4 + 5 * more, steps)


def test_triton_forms_are_chosen_by_the_table():
    with test_triton_ista.going(0):
        for percent, forward, backward in ((0, (1, 1), (5, 2)), (1 << 40, (3, 2), (11, 4))):
            form = {"ONE": percent}
            with forced(tables.FORWARD_FORM, form), forced(tables.BACKWARD_FORM, form):
                assert step(MANY) == step(FEW) == [forward, backward]
