"""What a run tells of itself: products per token or image, the machine's peak, and a file of metrics."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from crate_kernels._core import files
from crate_kernels.models.crate_lm import TiedISTA
from crate_kernels.nn import ISTA, MSSA, CausalMSSA, OvercompleteISTA
from training.folder import describe

SIDE = {"cpu": 1024, "cuda": 8192}  # of the products that are timed


def flops(model: nn.Module, tokens: int) -> float:
    """Return floating-point operations per token of a training step: those of matrix products, three times forward.

    The backward has two products for each of the forward; what is recomputed does not count. Call it before the model
    is cut. Attention of ``tokens`` tokens has two products of tokens by tokens in each head; a causal mask halves them.
    A step of ISTA multiplies by its dictionary and back. Token statistics have no products.
    """
    total = 0
    for module in model.modules():
        if isinstance(module, nn.Linear):
            total += 2 * module.weight.numel()
        elif isinstance(module, ISTA):
            total += 4 * module.weight.numel()
        elif isinstance(module, (OvercompleteISTA, TiedISTA)):
            dictionary = module.D if isinstance(module, OvercompleteISTA) else module.weight
            total += 4 * module.steps * dictionary.numel()
        if isinstance(module, MSSA):
            total += (2 if module.causal else 4) * tokens * module.heads * module.dim_head
        elif isinstance(module, CausalMSSA):
            total += 2 * tokens * module.n_embd
    return 3 * total


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Return operations per second of square products, of all processes, which multiply at the same time."""
    side = SIDE[device.type]
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(5):
        dist.barrier()
        start = time.perf_counter()
        product = a @ b
        product[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - start)
    rate = torch.tensor(2.0 * side**3 / best, device=device)
    dist.all_reduce(rate)
    return rate.item()


class Metrics:
    """A line of JSON per step, in one file; other processes than the first write nothing.

    Args:
        path: the file. A run that resumes drops the lines of steps that it takes again.
        done: steps that the checkpoint has.
    """

    def __init__(self, path: Path, done: int) -> None:
        self.path = path
        kept = [line for line in _lines(path) if line["step"] < done]
        files.put(path, "".join(json.dumps(line) + "\n" for line in kept).encode())

    def write(self, line: dict[str, Any]) -> str:
        """Append the line of a step; return why it cannot be written, "" if it is."""
        try:
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            return describe(self.path, error)
        return ""


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file but the last one if the process was killed while it wrote that."""
    written = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in written if line.endswith("\n")]
