"""Heads of a projection: viewed, merged, and refused where a process has only some of them."""

import pytest
import torch
from torch import nn

from crate_kernels.nn import _heads


def test_heads_are_whole_on_every_process():
    projected = torch.arange(24.0).reshape(1, 2, 12)
    w = _heads.split_local("patch", projected, 4)
    assert w.shape == (1, 3, 2, 4)
    assert torch.equal(w, _heads.split(projected, 3))
    assert torch.equal(_heads.merge(w), projected)
    with pytest.raises(ValueError, match="patch: the projection must give whole heads of 5, got a width of 12; shard"):
        _heads.split_local("patch", projected, 5)
    assert _heads.whole("patch", projected, 12, "why") is projected
    with pytest.raises(NotImplementedError, match="patch: the projection must be whole, 24 wide, got 12: why"):
        _heads.whole("patch", projected, 24, "why")


def test_dropout_of_a_part_of_the_heads_is_refused():
    w, dropout = torch.ones(1, 3, 2, 4), nn.Dropout(0.25)
    assert _heads.dropout_p("MSSA", dropout, w, 3) == 0.25
    with pytest.raises(
        NotImplementedError, match=r"MSSA: dropout must be 0 where heads are sharded \(3 of 6 are here\)"
    ):
        _heads.dropout_p("MSSA", dropout, w, 6)
    assert _heads.dropout_p("MSSA", dropout.eval(), w, 6) == 0.0
