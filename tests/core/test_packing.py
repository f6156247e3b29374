"""Packed sequences as a padded batch: offsets that nobody could check are clamped, and no row is taken twice."""

import pytest
import torch

from crate_kernels._core import packing

PACKED = torch.arange(1.0, 8.0).view(7, 1, 1)  # seven tokens of one head and one channel
OFFSETS = {
    # Offsets and max_seqlen; the padded batch; which rows come back.
    "all": ((0, 3, 3, 7), 4, [[1, 2, 3, 0], [0] * 4, [4, 5, 6, 7]], [1, 2, 3, 4, 5, 6, 7]),
    "rows-after-the-last": ((0, 3, 5), 3, [[1, 2, 3], [4, 5, 0]], [1, 2, 3, 4, 5, 0, 0]),
    "rows-after-an-empty-one": ((0, 6, 6), 6, [[1, 2, 3, 4, 5, 6], [0] * 6], [1, 2, 3, 4, 5, 6, 0]),
    "rows-before-the-first": ((2, 4, 7), 3, [[3, 4, 0], [5, 6, 7]], [0, 0, 3, 4, 5, 6, 7]),
    "longer-than-max_seqlen": ((0, 4, 7), 2, [[1, 2], [5, 6]], [1, 2, 0, 0, 5, 6, 0]),
    "beyond-the-total": ((0, 3, 99), 4, [[1, 2, 3, 0], [4, 5, 6, 7]], [1, 2, 3, 4, 5, 6, 7]),
    "negative": ((-5, 3, 7), 4, [[1, 2, 3, 0], [4, 5, 6, 7]], [1, 2, 3, 4, 5, 6, 7]),
}


@pytest.mark.parametrize(("offsets", "max_seqlen", "batch", "back"), OFFSETS.values(), ids=OFFSETS)
def test_every_row_has_one_place_or_is_zero(offsets, max_seqlen, batch, back):
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32)
    padded, where = packing.pad(PACKED, cu_seqlens, max_seqlen)
    assert padded[:, 0, :, 0].tolist() == batch
    assert where.pack(padded).flatten().tolist() == back
    # Outputs of padded queries belong to no row.
    assert where.pack(torch.ones_like(padded)).flatten().tolist() == [float(row > 0) for row in back]
    assert where.pack_rows(where.pad_rows(PACKED.view(1, 7)))[0].tolist() == back
