"""Sequences that follow each other in one row: each attends to itself alone."""

import pytest
import torch
from torch.testing import assert_close

from crate_kernels.models.aot import MHSA
from crate_kernels.nn import MSSA, CausalMSSA, CausalTSSA
from tests.nn.test_nn import DIM, HEAD_DIM, HEADS, built, tokens

LENGTHS = [4, 1, 2]
OFFSETS = torch.tensor([0, 4, 5, 7], dtype=torch.int32)
PACKED = {
    "mssa": lambda: MSSA(DIM, HEADS, HEAD_DIM),
    "mssa-tied": lambda: MSSA(DIM, HEADS, HEAD_DIM, tied=True),
    "mssa-causal": lambda: MSSA(DIM, HEADS, HEAD_DIM, causal=True),
    "causal-mssa": lambda: CausalMSSA(DIM, HEADS),
    "causal-tssa": lambda: CausalTSSA(DIM, HEADS, 4),  # as many positions as the longest has
    "mhsa": lambda: MHSA(DIM, HEADS),
    "mhsa-causal": lambda: MHSA(DIM, HEADS, causal=True),
}


@pytest.mark.parametrize("make", PACKED.values(), ids=PACKED)
def test_each_sequence_is_as_alone(make):
    module, results = built(make()), []
    for split in (False, True):
        module.zero_grad()
        x = tokens(1, 7, DIM).requires_grad_()
        if split:
            out = torch.cat([module(part) for part in x.split(LENGTHS, 1)], 1)
        else:
            out = module(x, cu_seqlens=OFFSETS, max_seqlen=4)
        out.square().sum().backward()
        results.append([out, x.grad, *(p.grad for p in module.parameters())])
    assert_close(*results)


REFUSED = {
    "rows": ({"cu_seqlens": OFFSETS, "max_seqlen": 4}, 2, ValueError, "MSSA: x must be one row .*, got 2 rows"),
    "mask": (
        {"cu_seqlens": OFFSETS, "max_seqlen": 4, "key_padding_mask": torch.ones(1, 7, dtype=torch.bool)},
        1,
        ValueError,
        "mssa: key_padding_mask must be None with cu_seqlens",
    ),
    "no-length": ({"cu_seqlens": OFFSETS}, 1, TypeError, "mssa: max_seqlen must be an int with cu_seqlens"),
    "no-offsets": ({"max_seqlen": 4}, 1, ValueError, "mssa: max_seqlen must be None without cu_seqlens"),
    "weights": (
        {"cu_seqlens": OFFSETS, "max_seqlen": 4, "return_attention": True},
        1,
        ValueError,
        "MSSA: return_attention must be False with a cache or cu_seqlens",
    ),
}


@pytest.mark.parametrize(("options", "rows", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(options, rows, error, message):
    with pytest.raises(error, match=message):
        built(MSSA(DIM, HEADS, HEAD_DIM))(tokens(rows, 7, DIM), **options)
