"""DTensors through the public functions: sharded results, and the gradients of one process."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from crate_kernels import ista, ista_overcomplete, mssa, tssa
from crate_kernels._core import backends
from crate_kernels._core.backends import Backend
from crate_kernels.ops.mssa.call import MSSACall
from crate_kernels.ops.mssa.logsumexp import logsumexp
from tests.distributed.common import drawn, same

BATCH, HEADS, SEQLEN, DIM = 6, 6, 5, 4


def through(function, tensors, placements, expected_placement, sends=False, **options):
    """Outputs are sharded as expected, nothing is sent forward, and gradients are those of one process."""

    def run(group):
        mesh = init_device_mesh("cpu", (dist.get_world_size(group),))
        leaves = [t.clone().requires_grad_() for t in tensors]
        inputs = [
            distribute_tensor(t.clone(), mesh, [place]).requires_grad_()
            for t, place in zip(tensors, placements, strict=True)
        ]
        rest = {
            name: distribute_tensor(value, mesh, [placements[0]]) if isinstance(value, torch.Tensor) else value
            for name, value in options.items()
        }
        with CommDebugMode() as sent:
            out = function(*inputs, **rest)
        assert (sent.get_total_counts() > 0) is sends
        expected = function(*leaves, **options)
        outputs, wanted = (x if isinstance(x, tuple) else (x,) for x in (out, expected))
        for ours, theirs in zip(outputs, wanted, strict=True):
            assert ours.placements == (expected_placement,)
            same(ours.full_tensor(), theirs)
        sum(o.square().sum() for o in outputs).backward()
        sum(o.square().sum() for o in wanted).backward()
        for ours, theirs in zip(inputs, leaves, strict=True):
            same(ours.grad.full_tensor(), theirs.grad)

    return run


def behind_the_op(function):
    """Run a case with a backend that is behind the boundary of the ops, as kernels are."""

    def run(group):
        backends.register(Backend("plain", "tests.ops.{op}.plain"))
        try:
            function(group)
        finally:
            backends.unregister("plain")

    return run


def dropout_is_refused(group):
    mesh = init_device_mesh("cpu", (dist.get_world_size(group),))
    w = distribute_tensor(drawn(BATCH, HEADS, SEQLEN, DIM), mesh, [Shard(0)])
    temp = distribute_tensor(torch.ones(HEADS), mesh, [Replicate()])
    with pytest.raises(RuntimeError, match=r"tssa: dropout_p must be 0 with DTensors"):
        tssa(w, temp, dropout_p=0.5)


TOKENS, WEIGHT = drawn(BATCH, HEADS, DIM), drawn(DIM, DIM, seed=1)
WIDE, DECODER = drawn(DIM, 9, seed=1), drawn(DIM, 9, seed=2)
W, TEMP, BIAS = drawn(BATCH, HEADS, SEQLEN, DIM), drawn(HEADS, seed=1), drawn(HEADS, SEQLEN, seed=2)
MASK = torch.arange(SEQLEN) < torch.tensor([5, 3, 1, 5, 4, 2])[:, None]
ALL, FIRST, SECOND = Replicate(), Shard(0), Shard(1)
CASES = {
    "dtensor-ista": through(ista, (TOKENS, WEIGHT), (FIRST, ALL), FIRST),
    "dtensor-ista-tokens": through(ista, (TOKENS, WEIGHT), (SECOND, ALL), SECOND, nonnegative=False),
    "dtensor-ista-whole": through(ista, (TOKENS, WEIGHT), (ALL, ALL), ALL),
    "dtensor-overcomplete": through(ista_overcomplete, (TOKENS, WIDE, DECODER), (FIRST, ALL, ALL), FIRST),
    "dtensor-overcomplete-tied": through(ista_overcomplete, (TOKENS, WIDE), (FIRST, ALL), FIRST, steps=3),
    "dtensor-ista-uneven": through(ista, (drawn(7, HEADS, DIM), WEIGHT), (FIRST, ALL), FIRST),
    "dtensor-tssa-uneven": through(tssa, (drawn(7, HEADS, SEQLEN, DIM), TEMP), (FIRST, ALL), FIRST),
    # Codes are kept in even parts of all tokens: where these have uneven ones, they are gathered.
    "dtensor-overcomplete-uneven": through(
        ista_overcomplete, (drawn(BATCH * HEADS + 1, DIM), WIDE, DECODER), (FIRST, ALL, ALL), ALL, sends=True
    ),
    "dtensor-tssa": through(tssa, (W, TEMP), (FIRST, ALL), FIRST, return_membership=True),
    "dtensor-tssa-padded": through(tssa, (W, TEMP), (FIRST, ALL), FIRST, key_padding_mask=MASK),
    "dtensor-tssa-causal": through(
        lambda w, temp, bias: tssa(w, temp, causal=True, denom_bias=bias), (W, TEMP, BIAS), (FIRST, ALL, ALL), FIRST
    ),
    "dtensor-tssa-no-bias": through(tssa, (W, TEMP), (FIRST, ALL), FIRST, causal=True),
    **{
        f"dtensor-mssa-{name}": behind_the_op(
            through(
                mssa, (W[1:] if name == "uneven" else W,), (place,), place, return_lse=True, backend="plain", **options
            )
        )
        for name, place, options in (
            ("sequences", FIRST, {"key_padding_mask": MASK}),
            ("heads", SECOND, {"causal": True}),
            ("whole", ALL, {}),
            ("uneven", FIRST, {"causal": True}),
        )
    },
    # What composite adds to PyTorch's attention, for which PyTorch has a rule on GPUs alone.
    "dtensor-logsumexp": through(lambda w: logsumexp(w, MSSACall(scale=0.4, causal=True)), (W,), (SECOND,), SECOND),
    "dtensor-dropout": dropout_is_refused,
}
