"""What the planner of tssa's CUDA kernels launches and refuses, under the emulator."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from crate_kernels import TokenStatsCache
from crate_kernels._core import backends, plan
from crate_kernels._cuda import launch
from crate_kernels.ops.tssa import cuda
from crate_kernels.ops.tssa.call import Saved, TSSACall
from crate_kernels.ops.tssa.cuda import forms
from crate_kernels.ops.tssa.cuda.names import FULL
from crate_kernels.ops.tssa.cuda.parameters import TssaProblem
from tests.ops.common import FORMS, outputs_and_gradients, randn
from tests.ops.tssa.common import bias, call, going, temps, tokens

# (causal, emulated device, tokens, launches forward and backward)
LAUNCHES = {
    "full-block": (False, "block", 85, 1, 1),
    "full-cluster": (False, "cluster", 85, 1, 1),
    "full-chunks": (False, "chunks", 85, 5, 5),
    "causal-alone": (True, "block", 20, 1, 2),
    "causal-chunks": (True, "block", 85, 5, 7),
}


@pytest.fixture
def launched(monkeypatch):
    """Return the list of kernels that planners launch."""
    found, run = [], launch.run
    monkeypatch.setattr(launch, "run", lambda kernel, *rest: found.append(kernel) or run(kernel, *rest))
    return found


@pytest.mark.usefixtures("unrepeated")
@pytest.mark.parametrize("way", ["block", "cluster"])
def test_a_kernel_is_compiled_for_one_kind_of_parameters(way, backend, device, monkeypatch):
    """What the planner asks a kernel about, before a launch, is the kernel that it launches."""
    going(device, way)
    asked, function = [], launch.function
    monkeypatch.setattr(
        launch, "function", lambda kernel, on, types: asked.append((kernel, *types)) or function(kernel, on, types)
    )
    w = tokens(2, 3, 85, 32).requires_grad_()
    out, _ = call(False, backend)(w, temps(3))
    out.backward(tokens(2, 3, 85, 32, seed=1))
    assert len({kernel for kernel, *_ in asked}) == len(set(asked)) == 2


@pytest.mark.usefixtures("unrepeated")
@pytest.mark.parametrize(("causal", "way", "seqlen", "forward", "backward"), LAUNCHES.values(), ids=LAUNCHES)
def test_a_pass_takes_as_many_launches_as_its_form(causal, way, seqlen, forward, backward, backend, device, launched):
    going(device, way)
    w = tokens(2, 3, seqlen, 32).requires_grad_()
    out, _ = call(causal, backend)(w, temps(3))
    assert len(launched) == forward
    out.backward(tokens(2, 3, seqlen, 32, seed=1))
    assert len(launched) == forward + backward
    assert {*launched} <= {*cuda.kernels()}


@pytest.mark.usefixtures("unrepeated")
def test_a_causal_backward_in_chunks_asks_for_no_more_shared_memory_than_it_uses(backend, device, monkeypatch):
    going(device, "block")
    w, shapes, run = tokens(2, 3, 85, 32).requires_grad_(), {}, launch.run
    monkeypatch.setattr(
        launch, "run", lambda kernel, shape, *rest: shapes.update({kernel.name: shape}) or run(kernel, shape, *rest)
    )
    out, _ = call(True, backend)(w, temps(3))
    shapes.clear()
    out.backward(tokens(2, 3, 85, 32, seed=1))
    (asked,) = {shape.shared_bytes for name, shape in shapes.items() if "dmoment" in name}
    assert asked == 4 * 3 * 32 // 4  # a float for each vector of 4 channels


@pytest.mark.parametrize(("causal", "way", "seqlen"), [case[:3] for case in LAUNCHES.values()], ids=LAUNCHES)
def test_a_later_call_is_a_plan(causal, way, seqlen, backend, device, repeated_calls):
    going(device, way)
    inputs = tokens(2, 3, seqlen, 32), temps(3), *((bias(3, seqlen),) if causal else ())
    outputs_and_gradients(call(causal, backend), *inputs)
    before, _, _ = plan.counts()
    outputs_and_gradients(call(causal, backend), *inputs)
    assert plan.counts()[0] - before == 2
    assert repeated_calls.refused == []


@FORMS
def test_addresses_that_a_plan_cannot_tell_apart_are_read_alike(causal, backend):
    """Plans know whether an address is a multiple of 16 bytes, and no more of it."""
    w, dout = (randn(4 * 3 * 40 * 16 + 8, dtype=torch.bfloat16, seed=seed) for seed in (0, 1))

    def results(offset):
        own, upstream = (
            torch.cat([t.new_zeros(offset), t])[offset:].as_strided((4, 3, 40, 16), (1920, 640, 16, 1))
            for t in (w, dout)
        )
        own, temp = own.requires_grad_(), temps(3).requires_grad_()
        out, membership = call(causal, backend)(own, temp)
        return out.detach(), membership.detach(), *torch.autograd.grad(out, [own, temp], upstream)

    expected = results(8)
    for offset in (4, 1, 4, 8):
        torch.testing.assert_close(results(offset), expected, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("kernel", ["energy", "scan", "output"])
def test_a_step_whose_kernels_do_not_all_compile_leaves_its_cache(kernel, backend, monkeypatch):
    """Of five launches the second one writes to it."""
    compiled = launch.function

    def function(found, *rest):
        if kernel in found.name:
            raise backends.Refused(f"cannot compile {found.name}")
        return compiled(found, *rest)

    monkeypatch.setattr(launch, "function", function)
    cache = TokenStatsCache(2, 3, 16)
    with pytest.raises(NotImplementedError, match="cannot compile tssa_"):
        call(True, backend, cache=cache)(tokens(2, 3, 80, 16), temps(3))
    assert not any(t.any() for t in cache._tensors())


@pytest.mark.parametrize("name", ["energy", "weighted", "mass", "lengths"])
def test_a_cache_of_which_kernels_take_the_address_alone_is_contiguous(name, backend):
    state = TokenStatsCache(2, 3, 16)._tensors()
    stored = dict(zip(("energy", "weighted", "mass", "lengths"), state, strict=True))
    apart = torch.stack([stored[name], stored[name]], -1)[..., 0]
    state = state._replace(**{name: apart})
    with pytest.raises(ValueError, match=rf"^tssa: cache\.{name} must be contiguous"):
        cuda.forward(tokens(2, 3, 8, 16), temps(3), None, TSSACall(), True, state)


@FORMS
def test_offsets_that_are_not_contiguous_are_refused(causal, backend):
    w, bounds = torch.randn(9, 3, 16), torch.tensor([0, 7, 4, 7, 9, 7], dtype=torch.int32)[::2]
    options = TSSACall(cu_seqlens=bounds, max_seqlen=5)
    statistics = (None, None, options.empty_sums(w)) if causal else torch.rand(2, 2, 3, 16)
    saved = Saved(w, temps(3), None, torch.rand(3, 9), *statistics)
    refused = pytest.raises(ValueError, match=r"^tssa: cu_seqlens must be contiguous")
    with refused:
        cuda.forward(w, temps(3), None, options, causal)
    with refused:
        cuda.backward(w, None, saved, options, causal)


H100: Any = SimpleNamespace(capability=90, multiprocessors=132, shared_limit=227 * 1024)


def sizes(nsequences, seqlen, width):
    return TssaProblem(nsequences=nsequences, seqlen=seqlen, width=width, nheads=4, head_dim=width // 4)


# So many sequences, tokens and channels of 16 bits, and the blocks that share a sequence.
CLUSTERS = {
    "enough-sequences": (256, 40, 128, 1),
    "idle-multiprocessors": (20, 256, 128, 4),
    "few-rows-each": (1, 40, 128, 2),
    "as-many-as-there-are": (1, 2048, 128, 8),
    "beyond-a-half": (256, 500, 128, 2),
    "beyond-a-block": (256, 1000, 128, 4),
    "beyond-all": (256, 8000, 128, None),
}


@pytest.mark.parametrize(("nsequences", "seqlen", "width", "cluster"), CLUSTERS.values(), ids=CLUSTERS)
def test_a_sequence_has_blocks_for_its_memory_and_for_idle_multiprocessors(nsequences, seqlen, width, cluster):
    form = forms._on_chip(sizes(nsequences, seqlen, width), FULL[1], 2, False, H100)
    assert (None if form is None else form.cluster) == cluster


# The same, whether backward, and the tokens of a chunk.
CHUNKS = {
    "at-most-256": (256, 1000, 64, False, 256),
    "four-blocks-for-each-multiprocessor": (10, 5000, 64, False, 96),
    "at-least-32": (1, 1000, 64, False, 32),
    "48-kB": (256, 1000, 128, False, 192),
    "48-kB-of-both": (256, 1000, 128, True, 96),
    "wide": (256, 1000, 4096, False, 16),
}


@pytest.mark.parametrize(("nsequences", "seqlen", "width", "backward", "chunk"), CHUNKS.values(), ids=CHUNKS)
def test_a_chunk_fills_the_multiprocessors_and_stays_in_the_caches(nsequences, seqlen, width, backward, chunk):
    p = sizes(nsequences, seqlen, width)
    form = forms._in_chunks(p, FULL[1], 2, backward, H100)
    assert (p.chunk_size, form.cuts) == (chunk, -(-seqlen // chunk))


# Of the causal form: the same, the chunk and the threads.
CAUSAL = {
    "one-chunk": (4, 64, 256, False, 64, 64),
    "chunks-of-64": (4, 1000, 256, False, 64, 64),
    "many-sequences": (2000, 3000, 256, False, 1024, 64),
    "back": (4, 1000, 256, True, 32, 64),
    "back-wide": (4, 1000, 8192, True, 8, 256),
    "wide": (4, 1000, 8192, False, 64, 512),
}


@pytest.mark.parametrize(("nsequences", "seqlen", "width", "backward", "chunk", "threads"), CAUSAL.values(), ids=CAUSAL)
def test_a_causal_chunk_is_short_unless_sequences_are_many(nsequences, seqlen, width, backward, chunk, threads):
    p, w = sizes(nsequences, seqlen, width), torch.empty(1, 4, 1, width // 4)
    form = forms._causal_form(p, w, w if backward else None, H100)
    assert (p.chunk_size, form.threads) == (chunk, threads)
    assert form.cuts == (p.nchunks if p.nchunks > 1 else 0)
