"""Calls of the walking kernels of the causal form, for the emulator and for a GPU."""

from contextlib import contextmanager

from crate_kernels import testing
from crate_kernels._triton import table
from crate_kernels.ops.tssa.cuda import walking
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


class Walking:
    """A named call, as ``Persistent`` is one."""

    causal, taking, usual, nheads, head_dim = True, staticmethod(taking), PAIRS, 3, 32
    kernels = ("tssa_causal_fwd_walking_kernel", "tssa_causal_bwd_walking_kernel")

    def __init__(self, name):
        self.config, shape, given = {**CASES, **MORE}[name]
        options = {"causal": True, "return_membership": True, **given.get("options", {})}
        self.case = testing.Case("tssa", f"walking-{name}", shape, **{**given, "options": options})

    def check(self, backend, dtype, device="cpu"):
        """Hold a call that these kernels take to the error budget; return the largest share of it."""
        names, share = persistent.within_budget(self.case, backend, dtype, device, taking(self.config))
        launches = [name for name in names if "dbias" not in name]
        assert [f"{way}_walking" in name for way, name in zip(("fwd", "bwd"), launches, strict=True)] == [True, True]
        return share
