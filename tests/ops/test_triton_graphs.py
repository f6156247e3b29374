"""Plans under the capture of a graph: what they launch runs later, on inputs that were overwritten in between.

A driver stands in for CUDA's. It notes launches, and has Triton's interpreter make them when the graph is replayed.
What PyTorch computes within a plan it does not see: the products of ``ista``, the gradient of ``temp``.
"""

from functools import partial

import pytest
import torch

import crate_kernels as ck
from crate_kernels._core import backends, plan
from crate_kernels.ops.mssa.call import DecodeCall
from crate_kernels.ops.mssa.op import mssa_decode
from tests.ops.common import randn
from tests.ops.repeated import hits
from tests.tools.plans.replay import same_bits

if not backends._INTERPRETED or not plan.available():
    pytest.skip("runs what plans launch by Triton's interpreter: needs TRITON_INTERPRET=1", allow_module_level=True)

from tests.tools.plans import capture

MASK, TEMP = torch.tensor([[True] * 3 + [False] * 2]), torch.linspace(0.5, 1.5, 2)
CALLS = {
    "mssa-mask": partial(ck.mssa, key_padding_mask=MASK),
    "mssa-causal": partial(ck.mssa, causal=True),
    "tssa": partial(ck.tssa, temp=TEMP),
    "tssa-causal": partial(ck.tssa, temp=TEMP, causal=True),
}


def tokens(seed, seqlen=5):
    return randn(1, 2, seqlen, 16, seed=seed, dtype=torch.float32)


def step(call, w, dout):
    out = call(w, backend="triton")
    return out.detach(), *torch.autograd.grad(out, w, dout)


@pytest.mark.parametrize("name", CALLS)
def test_a_captured_step_follows_inputs_that_are_overwritten(name):
    call = CALLS[name]
    step(call, tokens(0).requires_grad_(), tokens(1))  # leaves the plans
    w, dout = tokens(2).requires_grad_(), tokens(3)
    with capture.capturing() as graph:
        found, results = hits(lambda: step(call, w, dout))
    assert found == 2, "forward and backward"
    for seed in (4, 6):
        values = tokens(seed).requires_grad_(), tokens(seed + 1)
        expected = step(call, *values)  # takes memory that the capture has freed
        with torch.no_grad():
            w.copy_(values[0])
            dout.copy_(values[1])
        graph.replay(w, dout, MASK, TEMP, *results)
        assert [same_bits(a, b) for a, b in zip(results, expected, strict=True)] == [True, True]


def test_a_captured_step_with_a_cache_resumes_where_the_last_replay_ended():
    """The options are those by which a GPU's steps are alike."""
    captured, direct = (ck.SubspaceCache(1, 2, 8, 16) for _ in range(2))
    options = DecodeCall(None, 1, True, 0.25, need_lse=True).rounded()

    def decode(w, cache):
        return mssa_decode(w, cache.data, cache.lengths, *options, "triton")

    with torch.no_grad():
        for cache in (captured, direct):
            decode(tokens(0, seqlen=1), cache)
        w = tokens(1, seqlen=1)
        with capture.capturing() as graph:
            found, results = hits(lambda: decode(w, captured))
        assert found == 1
        for seed in (2, 3, 4):
            w.copy_(tokens(seed, seqlen=1))
            graph.replay(w, captured.data, captured.lengths, *results)
            expected = decode(w.clone(), direct)
            assert [same_bits(a, b) for a, b in zip(results, expected, strict=True)] == [True, True]
    assert captured.lengths.tolist() == direct.lengths.tolist() == [4]
