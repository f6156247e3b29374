"""The tensor cores' operands: fragments and tiles against float64, and banks of shared memory by arithmetic."""

import pytest
import torch

from tests.ops.common import randn
from tests.ops.conftest import poisoned_memory  # noqa: F401

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
LENGTH = 13  # of 16 rows


def whole(*shape, seed, dtype):
    """Draw small integers: their products and sums are exact in every order."""
    return (3 * randn(*shape, seed=seed)).round().to(dtype)


@DTYPES
def test_a_product_is_that_of_its_fragments(dtype, library):
    a, b, d = whole(16, 16, seed=1, dtype=dtype), whole(16, 8, seed=2, dtype=dtype), whole(16, 8, seed=3, dtype=dtype)
    out = d.float()
    library.probe_product(a, b, out)
    assert torch.equal(out.double(), a.double() @ b.double() + d.double())


@DTYPES
def test_every_number_is_multiplied_as_it_is(dtype, library):
    """Subnormal ones too."""
    numbers = torch.arange(1 << 16).to(torch.int16).view(dtype)
    for a in torch.where(numbers.isfinite(), numbers, 0).view(-1, 16, 16):
        for first in (0, 8):
            out, chosen = torch.zeros(16, 8), torch.eye(16, dtype=dtype)[:, first : first + 8].contiguous()
            library.probe_product(a, chosen, out)
            assert torch.equal(out, a[:, first : first + 8].float())


@DTYPES
@pytest.mark.parametrize("access", ["wide", "narrow", "strided"])
@pytest.mark.parametrize(
    ("dim", "head_dim"), [(16, 16), (32, 24), (48, 48), (64, 40), (64, 64), (96, 96), (128, 72), (128, 128), (256, 256)]
)
def test_one_tile_is_both_operands(dim, head_dim, access, dtype, library):
    w, p = whole(16, head_dim, seed=1, dtype=dtype), whole(16, 16, seed=2, dtype=dtype)
    view = w
    if access == "strided":
        view = torch.stack([w, w + 1], -1)[..., 0]
    if access == "narrow":
        view = torch.cat([w[:, :1], w], 1)[:, 1:]
    scores, mixed, turned = torch.empty(16, 16), torch.empty(16, dim), torch.empty(16, dim)
    library.probe_tile(view, p, dim, LENGTH, access == "wide", scores, mixed, turned)
    tile = torch.zeros(16, dim, dtype=torch.float64)
    tile[:LENGTH, :head_dim] = w[:LENGTH]
    assert torch.equal(scores.double(), tile @ tile.T)
    assert torch.equal(mixed.double(), p.double() @ tile)
    assert torch.equal(turned.double(), p.double().T @ tile)


@pytest.mark.parametrize("dim", [16, 32, 48, 64, 96, 112, 128, 256])
def test_no_eight_rows_meet_in_a_bank(dim, library):
    """ldmatrix reads a chunk of 16 bytes of eight rows at once, and a copy writes eight chunks one after another."""
    rows, chunks = 64, dim // 8
    offsets = torch.empty(rows, chunks, dtype=torch.int64)
    library.probe_offsets(offsets)
    assert offsets.flatten().sort()[0].tolist() == list(range(rows * chunks))
    banks = offsets % 8
    reads = banks.view(rows // 8, 8, chunks).transpose(1, 2).reshape(-1, 8)
    writes = banks.view(-1, 8)
    for eight in (reads, writes):
        assert torch.equal(eight.sort(1)[0], torch.arange(8).expand_as(eight))
