"""Calls of the persistent kernels of the full form, for the emulator and for a GPU."""

from contextlib import contextmanager
from unittest import mock

import torch

from crate_kernels import testing
from crate_kernels._cuda import launch
from crate_kernels._triton import table
from crate_kernels.ops.tssa.cuda import persistent

MAX_SHARED = 227 * 1024


def config(cluster, buffers, threads, together=1):
    return {"CLUSTER": cluster, "BUFFERS": buffers, "THREADS": threads, "TOGETHER": together}


TWICE, FOUR_TIMES = config(2, 2, 96, together=2), config(2, 1, 96, together=4)
AHEAD, ALONE, PAIRS, EIGHT = config(4, 2, 192), config(4, 1, 192), config(2, 2, 192), config(8, 1, 384)


def case(name, shape, **changes):
    options = {"return_membership": True, **changes.pop("options", {})}
    return testing.Case("tssa", f"persistent-{name}", shape, options, **changes)


DROPPED = {"options": {"dropout_p": 0.3}}
PACKED = (64, 0, 101, 1, 130)
# name: (configuration, (batch, heads, tokens, channels), what else a case has). Those of one kernel stand together:
# g++ takes seconds for each kernel.
CASES = {
    "196-tokens": (AHEAD, (3, 8, 196, 48), {}),
    "dropout": (AHEAD, (3, 8, 61, 48), DROPPED),
    "one-token": (AHEAD, (5, 8, 1, 48), {}),
    "blocks-without-tokens": (AHEAD, (2, 8, 5, 48), {}),
    "packed": (AHEAD, (0, 8, 0, 48), {"lengths": PACKED}),
    "packed-dropout": (AHEAD, (0, 8, 0, 48), {"lengths": PACKED, **DROPPED}),
    "dead-channel": (AHEAD, (2, 8, 50, 48), {"special": "dead channel"}),
    "mixed-norms": (AHEAD, (2, 8, 50, 48), {"special": "mixed norms"}),
    "padded-left": (AHEAD, (3, 8, 77, 48), {"padding": "left"}),
    "padded-scattered": (AHEAD, (3, 8, 77, 48), {"padding": "scattered", **DROPPED}),
    "padded-row": (AHEAD, (3, 8, 20, 48), {"padding": "row"}),
    "768-channels": (EIGHT, (2, 12, 197, 64), {}),
    "odd-heads": (PAIRS, (5, 3, 45, 16), {}),
    "odd-heads-padded": (PAIRS, (3, 3, 45, 16), {"padding": "scattered"}),
}
# Compiled and run with all tests alone.
MORE = {
    "two-clusters": (TWICE, (3, 3, 150, 16), {}),
    "two-clusters-packed": (TWICE, (0, 3, 0, 16), {"lengths": (90, 0, 3, 161, 1), **DROPPED}),
    "two-clusters-padded": (TWICE, (3, 3, 97, 16), {"padding": "scattered", **DROPPED}),
    "two-clusters-padded-row": (TWICE, (3, 3, 20, 16), {"padding": "row"}),
    "four-clusters": (FOUR_TIMES, (2, 3, 210, 16), {}),
    "four-clusters-4096-tokens": (config(8, 1, 192, together=4), (1, 4, 4096, 48), {}),
    "cluster-of-16": (config(16, 1, 96), (2, 3, 150, 16), {}),
    "192-channels": (PAIRS, (2, 4, 196, 48), {}),
    "192-channels-784-tokens": (config(4, 1, 384), (1, 4, 784, 48), {}),
    "384-channels-784-tokens": (EIGHT, (1, 8, 784, 48), {}),
    "384-channels-1024-tokens": (EIGHT, (1, 8, 1024, 48), {}),
    "512-channels": (config(4, 1, 384), (2, 8, 196, 64), {}),
    "512-channels-784-tokens": (config(8, 1, 192), (1, 8, 784, 64), {}),
    "512-channels-1024-tokens": (config(8, 1, 192), (1, 8, 1024, 64), {"forward": True}),
    "768-channels-of-48": (config(8, 2, 192), (2, 16, 196, 48), {}),
    "768-channels-784-tokens": (EIGHT, (1, 16, 784, 48), {"forward": True}),
    "768-channels-1024-tokens": (config(8, 1, 192), (1, 16, 1024, 48), {"forward": True}),
    # Both directions fit several clusters, or one of 16 blocks.
    "768-channels-784-tokens-of-two-clusters": (config(8, 1, 384, together=2), (1, 16, 784, 48), {}),
    "768-channels-784-tokens-of-16-blocks": (config(16, 1, 384), (1, 16, 784, 48), {}),
    "512-channels-1024-tokens-of-two-clusters": (config(8, 1, 384, together=2), (1, 8, 1024, 64), {}),
    "768-channels-1024-tokens-of-four-clusters": (config(8, 1, 384, together=4), (1, 16, 1024, 48), {}),
    "padded-alone": (ALONE, (3, 8, 77, 48), {"padding": "scattered"}),
    "32-heads": (ALONE, (2, 32, 30, 16), {}),
    "one-head": (PAIRS, (2, 1, 30, 128), {}),
    "1536-channels": (config(8, 1, 192), (1, 24, 60, 64), {}),
}


@contextmanager
def taking(chosen):
    """Have a configuration taken in both directions, as tuning may find."""
    with table.forced(persistent.FORWARD, chosen), table.forced(persistent.BACKWARD, chosen):
        yield


def within_tolerance(case, backend, dtype, device, forced, twice=False):
    """Compare a call with the error tolerance; return the names of the kernels that it launched and its largest share.

    ``twice``: a second run has to have the same bits.
    """
    inputs, names, run = testing.make_inputs(case, dtype, device), [], launch.run
    with forced:
        with mock.patch.object(launch, "run", lambda kernel, *rest: names.append(kernel.name) or run(kernel, *rest)):
            results = testing.run(case, inputs, backend)
        again = testing.run(case, inputs, backend) if twice else None
    eager, exact = (testing.run(case, i, "reference") for i in (inputs, inputs.to(torch.float64)))
    found = testing.measure(results, eager, exact, dtype)
    assert all(one.passed for one in found), found
    if twice:
        assert all(torch.equal(results[name], again[name]) for name in results), "two runs differ in their bits"
    return names, max(one.share for one in found)


class Persistent:
    """A named call.

    Attributes:
        usual: the configuration of the calls without a name; with it these kernels take so many heads and channels.
    """

    causal, taking, usual, nheads, head_dim = False, staticmethod(taking), AHEAD, 8, 48
    kernels = ("tssa_full_fwd_persistent_kernel", "tssa_full_bwd_persistent_kernel")

    def __init__(self, name):
        self.config, shape, options = {**CASES, **MORE}[name]
        options = dict(options)
        self.forward_alone = options.pop("forward", False)  # w and dout do not fit
        self.case = case(name, shape, **options)

    def fits(self):
        """Return whether the tokens fit a cluster's shared memory, forward and backward."""
        _, nheads, seqlen, head_dim = self.case.shape
        sizes = nheads, head_dim, seqlen or max(self.case.lengths)
        return [persistent.shared_bytes(*sizes, back, self.config) <= MAX_SHARED for back in (False, True)]

    def check(self, backend, dtype, device="cpu", twice=False):
        """Compare a call that these kernels take with the error tolerance; return the largest share of it."""
        names, share = within_tolerance(self.case, backend, dtype, device, taking(self.config), twice)
        taken = [any(f"full_{way}_persistent" in name for name in names) for way in ("fwd", "bwd")]
        assert taken == [True, not self.forward_alone]
        return share
