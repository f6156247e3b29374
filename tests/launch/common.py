"""The pretended table: its configurations, and what each takes."""

import torch

SHIPPED = {"BLOCK": 1, "num_warps": 4}
CANDIDATES = ({"BLOCK": 2, "num_warps": 4}, {"BLOCK": 3, "num_warps": 4}, {"BLOCK": 4, "num_warps": 8})
# What each takes, by BLOCK: 3 is wrong and 4 does not run, though they would be the fastest.
SECONDS, WRONG, BROKEN = {1: 5.0, 2: 2.0, 3: 1.0, 4: 0.5}, 3, 4
CUDA = torch.device("cuda", 0)
