"""Calls of the walking kernels of the causal form, for the emulator and for a GPU."""

import math
from contextlib import contextmanager, nullcontext
from unittest import mock

import torch

from crate_kernels import testing
from crate_kernels._core import operator
from crate_kernels._triton import table
from crate_kernels.ops.tssa import cuda, op
from crate_kernels.ops.tssa.call import TSSACall
from crate_kernels.ops.tssa.cuda import walking
from crate_kernels.ops.tssa.sums import saved_sums
from tests.ops.tssa import persistent


def config(cluster, buffers, threads, tokens):
    return {"CLUSTER": cluster, "BUFFERS": buffers, "THREADS": threads, "TOKENS": tokens}


PAIRS, FOURS, EIGHT, BACK = config(2, 2, 96, 5), config(4, 1, 192, 7), config(8, 1, 384, 12), config(8, 1, 384, 8)
DROPPED = {"options": {"dropout_p": 0.3}}
PACKED = (90, 0, 3, 1, 80, 161)
# name: (configuration, (batch, heads, tokens, channels), what else a case has). Those of one kernel stand together.
CASES = {
    "three-steps": (PAIRS, (2, 3, 190, 32), {}),
    "whole-steps": (PAIRS, (3, 3, 160, 32), {}),
    "dropout": (PAIRS, (3, 3, 90, 32), DROPPED),
    "one-token": (PAIRS, (4, 3, 1, 32), {}),
    "few-tokens": (PAIRS, (2, 3, 7, 32), {}),
    "packed": (PAIRS, (0, 3, 0, 32), {"lengths": PACKED}),
    "packed-dropout": (PAIRS, (0, 3, 0, 32), {"lengths": PACKED, **DROPPED}),
    "dead-channel": (PAIRS, (2, 3, 90, 32), {"special": "dead channel"}),
    "mixed-norms": (PAIRS, (2, 3, 90, 32), {"special": "mixed norms"}),
}
# Compiled and run with all tests alone.
MORE = {
    "padded-left": (PAIRS, (3, 3, 190, 32), {"padding": "left"}),
    "padded-right": (PAIRS, (3, 3, 190, 32), {"padding": "right"}),
    "padded-scattered": (PAIRS, (3, 3, 97, 32), {"padding": "scattered", **DROPPED}),
    "padded-row": (PAIRS, (3, 3, 20, 32), {"padding": "row"}),
    "384-channels": (FOURS, (2, 8, 300, 48), {}),
    "384-channels-padded": (FOURS, (2, 8, 300, 48), {"padding": "scattered"}),
    "768-channels": (BACK, (2, 12, 700, 64), {}),
    "768-channels-of-48": (config(8, 2, 384, 4), (1, 16, 300, 48), {}),
    "32-heads": (config(4, 1, 192, 4), (2, 32, 60, 16), {}),
    "one-head": (config(2, 2, 96, 3), (2, 1, 90, 128), {}),
}


@contextmanager
def taking(chosen):
    """Have a configuration taken in both directions, as tuning may find."""
    with table.forced(walking.FORWARD, chosen), table.forced(walking.BACKWARD, chosen):
        yield


def step_of(chosen, width):
    """Return the tokens of a cluster's step."""
    return chosen["CLUSTER"] * walking.chunk_of(width, chosen)


@contextmanager
def saving(chosen, saves=True):
    """Have a configuration taken, with the sums that forwards save or without; yield the distances that are read.

    Saved sums are checked, and lie between numbers that nothing may write.
    """
    plan, forward, usual, read, around = walking.plan, op.tssa_causal_fwd, TSSACall.empty_sums, [], []

    def planned(p, w, dout, *rest):
        found = plan(p, w, dout, *rest)
        if dout is not None and found is not None:
            read.append(p.sums_every)
        return found

    def empty(call, w):
        if not operator.is_plain_tensor(w):
            return usual(call, w)
        shape = call.sums_shape(w)
        sizes = (shape[-1], math.prod(shape), shape[-1])
        before, found, behind = w.new_full((sum(sizes),), torch.nan, dtype=torch.float32).split(sizes)
        around.extend((before, behind))
        return found.view(shape)

    def checked(w, *rest):
        out, membership, sums = forward(w, *rest)
        _, options, _ = operator.split(TSSACall, rest)
        if operator.is_plain_tensor(w) and sums.numel():
            exact, used = saved_sums(w, membership, options), before_steps(sums, options)
            assert ((sums - exact).abs() <= 2e-6 * exact.abs())[used].all(), "saved sums are others"
        return out, membership, sums

    with (
        taking(chosen),
        mock.patch.object(walking, "plan", planned),
        mock.patch.object(op, "tssa_causal_fwd", checked),
        mock.patch.object(TSSACall, "empty_sums", empty),
        mock.patch.object(cuda, "sums_read_every", cuda.sums_read_every if saves else lambda *_, **__: 0),
    ):
        yield read
    assert all(t.isnan().all() for t in around), "numbers beside saved sums were written"


def before_steps(sums, options):
    """Return which rows of saved sums are before a step of their sequence: all but of packed ones."""
    if options.cu_seqlens is None:
        return torch.ones(sums.shape[:2], dtype=torch.bool)
    lengths = options.cu_seqlens[1:] - options.cu_seqlens[:-1]
    return (options.sums_every * torch.arange(1, sums.shape[1] + 1))[None] < lengths[:, None].cpu()


class Walking:
    """A named call, as ``Persistent`` is one."""

    causal, taking, usual, nheads, head_dim = True, staticmethod(taking), PAIRS, 3, 32
    kernels = ("tssa_causal_fwd_walking_kernel", "tssa_causal_bwd_walking_kernel")

    def __init__(self, name):
        self.config, shape, changes = {**CASES, **MORE}[name]
        options = {"causal": True, "return_membership": True, **changes.get("options", {})}
        self.case = testing.Case("tssa", f"walking-{name}", shape, **{**changes, "options": options})

    def check(self, backend, dtype, device="cpu", twice=False):
        """Compare a call that these kernels take with the error tolerance; return the largest share of it.

        The backward begins with the sums that the forward saved, and then with those that it finds itself.
        """
        _, nheads, seqlen, head_dim = self.case.shape
        step, shares = step_of(self.config, nheads * head_dim), []
        for saves in (True, False):
            with saving(self.config, saves) as read:
                names, share = persistent.within_tolerance(self.case, backend, dtype, device, nullcontext(), twice)
            launches = [name for name in names if "dbias" not in name]
            assert [f"{way}_walking" in name for way, name in zip(("fwd", "bwd"), launches, strict=True)] == [True] * 2
            assert read == [step if saves and (seqlen or max(self.case.lengths)) > step else 0] * (1 + twice)
            shares.append(share)
        return max(shares)
