"""``traffic`` against the bytes that the collectives sent."""

from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from crate_kernels import distributed
from crate_kernels.distributed import heads, layout
from crate_kernels.distributed.collectives import ranks
from tests.distributed.common import drawn, own


@contextmanager
def counted():
    """Count what this process sends, into the one number of the list."""
    sent = [0]

    def wrap(name, size):
        function = getattr(dist, name)

        def call(*args, group=None, **kwargs):
            sent[0] += size(args, dist.get_world_size(group), dist.get_rank(group))
            return function(*args, group=group, **kwargs)

        return patch.object(dist, name, call)

    def batch(calls, function=dist.batch_isend_irecv):
        sent[0] += sum(call.tensor.nbytes for call in calls if call.op is dist.isend)
        return function(calls)

    def leaves(args, size, rank):
        _, x, _, counts = args
        return (x.numel() - counts[rank]) * x.element_size()

    with (
        wrap("all_reduce", lambda args, size, rank: 2 * args[0].nbytes * (size - 1) // size),
        wrap("all_gather", lambda args, size, rank: args[1].nbytes * (size - 1)),
        wrap("all_to_all_single", leaves),
        patch.object(dist, "batch_isend_irecv", batch),
    ):
        yield sent


def of_both(run, w):
    """Bytes of the forward and of the backward."""
    w = w.requires_grad_()
    with counted() as forward:
        out = run(w)
    with counted() as backward:
        out.sum().backward()
    return forward[0], backward[0]


def is_counted(op, form, seqlen, dtype):
    def run(group):
        size = dist.get_world_size(group)
        shape = (2, 2 * size, seqlen, 3)
        w = own(drawn(*shape, dtype=dtype), group)
        temp = torch.ones(shape[1])

        def call(w):
            if op == "tssa":
                return distributed.tssa(w, temp, group, causal=form == "causal")
            return distributed.mssa(w, group, form=form, seqlen=seqlen, backend="composite")

        formula = distributed.traffic(op, shape, size, form, dtype=dtype)
        sent = of_both(call, w)
        if dist.get_rank(group) == 0:
            assert sent == (formula.forward, formula.backward)

    return run


def separate_tensors(group):
    """Attention with its own query, key and value, by the same exchanges."""
    members = ranks("test", group)
    shape = (1, members.size, 5 * members.size, 4)
    where = layout.split(shape[2], members.size, False)
    w = own(drawn(*shape, dtype=torch.float32), group)

    def call(w):
        query, key, value = (heads._ToHeads.apply(x, members, where) for x in (w, 2 * w, 3 * w))
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        return heads._ToTokens.apply(out, members, where)

    formula = distributed.traffic("mssa", shape, members.size, "heads", dtype=w.dtype)
    assert of_both(call, w) == (formula.separate_forward, formula.separate_backward)
    assert 2 * formula.forward == formula.separate_forward


def half_of_separate(group):
    for form in ("heads", "gather", "ring"):
        bytes_of = distributed.traffic("mssa", (1, 16, 8192, 64), 8, form)
        assert bytes_of.forward == bytes_of.separate_forward / 2
        assert bytes_of.backward <= (1 + 6 / 128) * bytes_of.separate_backward / 2


def refused(group):
    shape = (1, 3, 8, 4)
    for message, args in (
        (r"traffic: op must be one of mssa, tssa, got 'ista'", ("ista", shape, 2, "heads")),
        (r"traffic: form must be one of full, causal of tssa, got 'ring'", ("tssa", shape, 2, "ring")),
        (r"traffic: ranks must be >= 1, got 0", ("mssa", shape, 0, "ring")),
        (r"traffic: ranks must divide heads in form 'heads', got 2 ranks and 3 heads", ("mssa", shape, 2, "heads")),
    ):
        with pytest.raises(ValueError, match=message):
            distributed.traffic(*args)


FORMS = {"mssa": ("heads", "gather", "ring"), "tssa": ("full", "causal")}
CASES = {
    **{
        f"traffic-{op}-{form}-{seqlen}-{str(dtype)[6:]}": is_counted(op, form, seqlen, dtype)
        for op, forms in FORMS.items()
        for form in forms
        for seqlen, dtype in ((12, torch.float32), (7, torch.float64), (1, torch.bfloat16))
    },
    "traffic-separate": separate_tensors,
    "traffic-half": half_of_separate,
    "traffic-refused": refused,
}
