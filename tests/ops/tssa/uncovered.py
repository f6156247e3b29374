"""Packed rows of which offsets that no host looks at leave some out: what is written there by a backend's functions."""

import itertools

import torch

from crate_kernels._core import backends
from crate_kernels.ops.tssa.call import TSSACall
from tests.ops.common import randn


def run(bounds, longest, causal, backend, w, temp):
    """Return out, the membership of each token and the gradients of ``w`` and ``temp``."""
    kernel, dout = backends.kernel("tssa", backend), randn(*w.shape, seed=1).to(w)
    options = TSSACall(cu_seqlens=torch.tensor(bounds, dtype=torch.int32, device=w.device), max_seqlen=longest)
    inputs = (w, temp, None) if causal else (w, temp)
    forward, backward = (kernel.forward_causal, kernel.backward_causal) if causal else (kernel.forward, kernel.backward)
    out, *saved = forward(*inputs, options)
    dw, dtemp, *_ = backward(dout, None, *inputs, *saved, options)
    return out, saved[0].t(), dw, dtemp


def check(bounds, longest, causal, backend, w, temp):
    """All is finite and, where offsets rise, 0 in the rows of no sequence and something in the others."""
    *found, dtemp = run(bounds, longest, causal, backend, w, temp)
    covered = torch.zeros(len(w), dtype=torch.bool, device=w.device)
    for start, end in itertools.pairwise(min(max(n, 0), len(w)) for n in bounds):
        covered[start : min(end, start + longest)] = True
    assert dtemp.isfinite().all()
    for rows in found:
        assert rows.isfinite().all()
        if list(bounds) == sorted(bounds):
            assert not rows[~covered].any()
            assert rows[covered].flatten(1).any(1).all()
