"""Shared parts of the operators' GPU tests: draws, graphs, streams, and a ban on waiting for the device."""

import warnings
from contextlib import contextmanager

import torch

from tests.gpu.fixtures import DEVICE, DRY

HALF = torch.bfloat16
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tokens(*shape, dtype=HALF, seed=0):
    """Draw (batch, nheads, seqlen, head_dim) as heads cut from a projection."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    batch, nheads, seqlen, head_dim = shape
    w = torch.randn(batch, seqlen, nheads, head_dim, generator=generator, device=DEVICE, dtype=dtype)
    return w.transpose(1, 2)


def check_equal(actual, expected):
    """Check that every tensor equals another bit by bit."""
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


def captured(call, before=1):
    """Return a function that replays ``call`` as a graph; interpreted, one that calls it again.

    On a GPU ``call`` runs here ``before`` it is captured, at least once to compile, and under capture, which computes
    nothing: the second call of a kind leaves a plan, and the third is its repetition.
    """
    if DRY:
        return call
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(before):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()

    def replay():
        graph.replay()
        return results

    return replay


def on_a_busy_stream(call, w):
    """Return ``call(w)`` on a stream on which ``w`` arrives late: a read on another stream would see zeros."""
    if DRY:
        return call(w)
    late, side = torch.zeros_like(w), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        late.copy_(w)
        results = call(late)
    torch.cuda.current_stream().wait_stream(side)
    return results


@contextmanager
def no_waiting():
    """Make every call that waits for the device an error."""
    if DRY:
        yield
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says of itself that it is a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
