"""How many blocks and threads the planners of mssa's CUDA kernels launch, on an H100 that nobody needs for it."""

from types import SimpleNamespace

import pytest
import torch

from crate_kernels._cuda import launch
from crate_kernels.ops.mssa.call import MSSACall
from crate_kernels.ops.mssa.cuda import plain, tensor_cores
from crate_kernels.ops.mssa.splits import choose_splits

H100 = SimpleNamespace(multiprocessors=132)


@pytest.fixture
def launched(monkeypatch):
    """Return what would be launched: kernels by name, with blocks and threads."""
    found = []
    monkeypatch.setattr(launch, "gpu", lambda device: H100)
    monkeypatch.setattr(
        launch,
        "run",
        lambda kernel, shape, *rest: found.append((kernel.name.split("<")[0], shape.blocks, shape.threads)),
    )
    return found


def sizes(sequences, nheads, seqlen):
    return {"sequences": sequences, "nheads": nheads, "seqlen": seqlen, "products": True, "seed": None}


# Sequences, heads, tokens, channels; blocks and threads. A warp has 32 rows up to 128 channels, then 16.
ROWS = {
    "every-multiprocessor-has-a-block": ((1, 1, 1000, 64), 32, 32),
    "four-warps-at-most": ((10, 100, 1000, 64), 8000, 128),
    "two-where-fewer-blocks-are-too-few": ((1, 10, 1000, 64), 160, 64),
    "no-warp-without-rows": ((10, 100, 30, 128), 1000, 32),
    "two-warps-have-rows": ((10, 100, 64, 128), 1000, 64),
    "wide": ((10, 100, 1000, 256), 16000, 128),
    "no-tokens": ((10, 100, 0, 128), 1000, 32),
}


@pytest.mark.parametrize(("shape", "blocks", "threads"), ROWS.values(), ids=ROWS)
def test_rows_of_a_forward(shape, blocks, threads, launched):
    w = torch.empty(1, 1, 1, shape[-1], dtype=torch.bfloat16)
    tensor_cores.forward(sizes(*shape[:-1]), w, MSSACall(scale=-1.0))
    assert launched == [("mssa::mma_forward_kernel", blocks, threads)]


# What the form of pairs takes: a block for each head where there are enough, of a warp for 16 tokens.
PAIRS = {
    "taken": ((11, 12, 197, 64), {}, (132, 416)),
    "of-256-tokens": ((12, 12, 256, 40), {}, (144, 512)),
    "few-heads": ((10, 13, 197, 64), {}, None),
    "more-tokens": ((11, 12, 257, 64), {}, None),
    "wide": ((11, 12, 197, 65), {}, None),
    "causal": ((11, 12, 197, 64), {"causal": True}, None),
    "negative": ((11, 12, 197, 64), {"scale": -1.0}, None),
}


@pytest.mark.parametrize(("shape", "options", "taken"), PAIRS.values(), ids=PAIRS)
def test_which_forwards_pairs_take(shape, options, taken, launched):
    w = torch.empty(1, 1, 1, shape[-1], dtype=torch.bfloat16)
    tensor_cores.forward(sizes(*shape[:-1]), w, MSSACall(**{"scale": 1.0, **options}))
    ((name, *found),) = launched
    assert name == ("mssa::mma_forward_kernel" if taken is None else "mssa::mma_pairs_kernel")
    assert taken is None or tuple(found) == taken


def test_a_backward_of_tensor_cores_finds_the_shift_first(launched):
    w = torch.empty(1, 1, 1, 64, dtype=torch.bfloat16)
    tensor_cores.backward(sizes(10, 100, 1000), w, MSSACall(scale=1.0))
    assert launched == [("mssa::mma_shift_kernel", 16000, 128), ("mssa::mma_backward_kernel", 8000, 128)]


# A block has 64 rows, and of the output two chunks of 64 channels at most.
PLAIN = {"one-chunk": (64, 16, 16), "two-chunks": (128, 16, 16), "two-groups": (129, 16, 32), "four": (400, 16, 64)}


@pytest.mark.parametrize(("head_dim", "once", "grouped"), PLAIN.values(), ids=PLAIN)
def test_blocks_of_fp32_products(head_dim, once, grouped, launched):
    w = torch.empty(1, 1, 1, head_dim)
    plain.forward(sizes(2, 4, 100), w)
    plain.backward(sizes(2, 4, 100), w)
    kernels = ("fwd", grouped), ("delta", once), ("measure", once), ("bwd", grouped)
    assert launched == [(f"plain::mssa_plain_{name}_kernel", blocks, 128) for name, blocks in kernels]


# Blocks, multiprocessors and tiles; the stretches of a sequence.
SPLITS = {
    "a-full-device": ((106, 132, 100), 1),
    "half-a-device": ((66, 132, 100), 2),
    "the-fewest-that-nearly-fill-it": ((1, 132, 1000), 109),
    "no-more-than-tiles": ((1, 132, 8), 7),
    "a-last-wave-that-is-full": ((88, 132, 100), 3),
    "at-most-128": ((1, 1000, 1000), 109),
    "nothing": ((1, 132, 0), 1),
}


@pytest.mark.parametrize(("inputs", "count"), SPLITS.values(), ids=SPLITS)
def test_stretches_of_a_sequence(inputs, count):
    assert choose_splits(*inputs) == count
