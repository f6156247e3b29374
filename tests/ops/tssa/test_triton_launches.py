"""How tssa's Triton kernels share a token's heads among programs, and its numbers among warps, on GPUs not there."""

import pytest
import torch

from crate_kernels._triton import launch
from crate_kernels._triton.table import forced
from crate_kernels.ops.tssa.call import TSSACall
from crate_kernels.ops.tssa.triton import launch as planner
from crate_kernels.ops.tssa.triton import tables

CONFIG = {"TOKENS": 4, "CHUNK": 16, "STAGES": 2, "LANE": 8}


def sizes(nheads, head_dim, dtype=torch.float32):
    return planner.TokenSizes(torch.empty(2, nheads, 10, head_dim, dtype=dtype), TSSACall())


# Architecture, heads, channels of each, dtype; groups, warps, and a program's heads and channels with padding. With 8
# numbers a lane a warp of 32 has 256, and one of 64 has 512.
GROUPS = {
    "all-heads": (("sm_90", 3, 64, torch.float32), (1, 2, 4, 64)),
    "maximum-that-fits": (("sm_90", 12, 64, torch.float32), (3, 2, 4, 64)),
    "maximum-that-divides": (("sm_90", 6, 64, torch.float32), (3, 1, 2, 64)),
    "one-each": (("sm_90", 7, 64, torch.float32), (7, 1, 1, 64)),
    "of-16-bits": (("sm_90", 12, 64, torch.bfloat16), (3, 1, 4, 64)),
    "wider-than-a-warp": (("sm_90", 2, 512, torch.float32), (2, 4, 1, 512)),
    "a-channel-for-every-lane": (("sm_90", 1, 4, torch.float32), (1, 1, 1, 32)),
    "a-little-more-than-a-warp": (("sm_90", 17, 8, torch.float32), (1, 2, 32, 8)),
    "lanes-of-padded-heads": (("sm_90", 3, 4, torch.float32), (1, 1, 4, 8)),
    "lanes-of-AMD": (("gfx942", 12, 64, torch.float32), (3, 1, 4, 64)),
    "eight-of-AMD": (("gfx942", 16, 64, torch.float32), (2, 2, 8, 64)),
}


@pytest.mark.parametrize(("size", "expected"), GROUPS.values(), ids=GROUPS)
def test_heads_of_a_program(size, expected, monkeypatch):
    arch, *shape = size
    monkeypatch.setattr(launch, "arch", lambda device: arch)
    with forced(tables.CAUSAL_BACKWARD, CONFIG):
        found = planner.head_groups(tables.CAUSAL_BACKWARD, sizes(*shape))
    dims = found["DIMS"]
    assert (found["ngroups"], found["num_warps"], dims.BLOCK_H, dims.BLOCK_D) == expected


# Architecture, heads, channels of each, numbers a lane; warps.
WARPS = {
    "a-power-of-two": (("sm_90", 12, 64), 8, 4),
    "one": (("sm_90", 1, 16), 8, 1),
    "exactly": (("sm_90", 16, 64), 8, 4),
    "padded-channels": (("sm_90", 12, 48), 8, 4),
    "512-threads-at-most": (("sm_90", 12, 64), 1, 16),
    "of-AMD": (("gfx942", 12, 64), 8, 2),
    "512-threads-of-AMD": (("gfx942", 12, 64), 1, 8),
}


@pytest.mark.parametrize(("size", "lane", "warps"), WARPS.values(), ids=WARPS)
def test_warps_of_a_token(size, lane, warps, monkeypatch):
    arch, *shape = size
    monkeypatch.setattr(launch, "arch", lambda device: arch)
    assert planner.warps_of(sizes(*shape), lane) == warps
