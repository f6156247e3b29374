"""The numbers of docs/distributed.md; tests/distributed/page_cases.py runs its lines."""

import re
from pathlib import Path

import pytest
import torch

from crate_kernels import models
from crate_kernels.distributed import traffic
from tests.distributed.training_cases import figures

PAGE = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text()
ROWS = re.findall(r'^\| `(\w+)`, `"(\w+)"` \| (\d+) \| (.*) \|$', PAGE, re.MULTILINE)
PLANS = re.findall(r"^\| (\d+) \| `(\w+)` \| (\d+) \| (\d+) \| (\d+) x (\d+) \| (.*) \|$", PAGE, re.MULTILINE)
OPERATIONS, IN_NODE, BETWEEN, NODE = 400e12, 450e9, 50e9, 8


@pytest.mark.parametrize(("op", "form", "seqlen", "numbers"), ROWS)
def test_bytes(op, form, seqlen, numbers):
    counted = traffic(op, (1, 16, int(seqlen), 64), 8, form)
    assert [cell.strip() for cell in numbers.split("|")] == ["" if n is None else f"{n / 1e6:.2f}" for n in counted]


def test_rows_are_found():
    assert len(ROWS) == 5
    assert len(PLANS) == 6


def planned(name, context, count, sequence, gpus):
    """Times of a step: products, weights in a node, gradients between nodes, sequences."""
    language = "_lm_" in name
    with torch.device("meta"):
        model = models.create(name, **({"block_size": context} if language else {}))
    number, copies = sum(p.numel() for p in model.parameters()), gpus // NODE
    products = figures.flops(model if language else model.transformer, context) * count * context / sequence
    weights, gradients = 8 * number * (NODE - 1) / NODE, 8 * number / NODE * (copies - 1) / copies
    sent = 0
    if sequence > 1:
        config = model.config
        op, form = ("tssa", "causal") if name.startswith("tost") else ("mssa", "heads")
        if op == "mssa" and config.n_head % sequence:
            form = "ring"
        each = traffic(op, (count, config.n_head, context, config.n_embd // config.n_head), sequence, form)
        sent = config.n_layer * (each.forward + each.backward)
    wire = IN_NODE if sequence <= NODE else BETWEEN
    return products / OPERATIONS, weights / IN_NODE, gradients / BETWEEN, sent / wire


@pytest.mark.exhaustive
@pytest.mark.parametrize(("gpus", "name", "context", "count", "data", "sequence", "times"), PLANS)
def test_plans(gpus, name, context, count, data, sequence, times):
    assert int(data) * int(sequence) == int(gpus)
    seconds = planned(name, int(context), int(count), int(sequence), int(gpus))
    assert [cell.strip() for cell in times.split("|")] == [f"{1000 * s:.0f}" if s else "" for s in seconds]
