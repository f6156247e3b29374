"""Calls of the walking kernels of the causal form, for the emulator and for a GPU."""

from contextlib import contextmanager

from crate_kernels import testing
from crate_kernels._triton import table
from crate_kernels.ops.tssa.cuda import walking
from tests.ops.tssa import persistent


def config(cluster, buffers, threads, tokens):
    return {**persistent.config(cluster, buffers, threads), "TOKENS": tokens}


PAIRS, FOURS, EIGHT = config(2, 2, 96, 2), config(4, 1, 192, 8), config(8, 1, 384, 12)
DROPPED = {"options": {"dropout_p": 0.3}}
PACKED = (70, 0, 3, 1, 64, 129)
# name: (configuration, (batch, heads, tokens, channels), what else a case has). Those of one kernel stand together.
CASES = {
    "three-steps": (PAIRS, (2, 3, 150, 16), {}),
    "whole-steps": (PAIRS, (3, 3, 128, 16), {}),
    "dropout": (PAIRS, (3, 3, 70, 16), DROPPED),
    "one-token": (PAIRS, (4, 3, 1, 16), {}),
    "few-tokens": (PAIRS, (2, 3, 5, 16), {}),
    "packed": (PAIRS, (0, 3, 0, 16), {"lengths": PACKED}),
    "packed-dropout": (PAIRS, (0, 3, 0, 16), {"lengths": PACKED, **DROPPED}),
    "dead-channel": (PAIRS, (2, 3, 70, 16), {"special": "dead channel"}),
    "mixed-norms": (PAIRS, (2, 3, 70, 16), {"special": "mixed norms"}),
    "padded-left": (PAIRS, (3, 3, 150, 16), {"padding": "left"}),
    "padded-right": (PAIRS, (3, 3, 150, 16), {"padding": "right"}),
    "padded-scattered": (PAIRS, (3, 3, 77, 16), {"padding": "scattered", **DROPPED}),
    "padded-row": (PAIRS, (3, 3, 20, 16), {"padding": "row"}),
}
# Compiled and run with all tests alone.
MORE = {
    "384-channels": (FOURS, (2, 8, 300, 48), {}),
    "384-channels-padded": (FOURS, (2, 8, 300, 48), {"padding": "scattered"}),
    "768-channels": (EIGHT, (2, 12, 700, 64), {}),
    "768-channels-of-48": (config(8, 2, 384, 8), (1, 16, 300, 48), {}),
    "32-heads": (config(4, 1, 192, 4), (2, 32, 60, 16), {}),
    "one-head": (config(2, 2, 96, 3), (2, 1, 90, 128), {}),
}


@contextmanager
def taking(chosen):
    """Have a configuration taken, as tuning may find."""
    with table.forced(walking.FORWARD, chosen):
        yield


class Walking:
    """A named call."""

    def __init__(self, name):
        self.config, shape, given = {**CASES, **MORE}[name]
        options = {"causal": True, "return_membership": True, **given.get("options", {})}
        self.case = testing.Case("tssa", f"walking-{name}", shape, **{**given, "options": options})

    def check(self, backend, dtype, device="cpu"):
        """Hold a call that these kernels take to the error budget; return the largest share of it."""
        names, share = persistent.within_budget(self.case, backend, dtype, device, taking(self.config))
        assert any("fwd_walking" in name for name in names)
        return share
