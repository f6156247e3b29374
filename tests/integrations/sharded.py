"""What two processes do with models that transformers shards: the plan's blocks, and the numbers of one process."""

import json
import os
import traceback
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.integrations import conftest  # noqa: F401 (torchvision)

RANKS = 2


def run(rank, folder, families):
    """Load, run and differentiate every family in this process, and write down what failed."""
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    failed = {}
    for family in families:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                check(family, folder / family, rank)
        except Exception:
            failed[family] = traceback.format_exc()
        dist.barrier()
    dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(failed))


def check(family, folder, rank):
    """Compare the model of a folder, sharded, with the whole one: logits, and gradients of a mean over both halves."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from transformers.distributed import DistributedConfig

    from tests.integrations import images, language

    module = language if family in language.CONFIGS else images
    _, expected = module.pair(family)
    model = type(expected).from_pretrained(folder, distributed_config=DistributedConfig(fsdp_size=RANKS)).eval()
    blocks = model.transformer.h if module is language else model.model._blocks()
    assert all(isinstance(block, FSDPModule) for block in blocks)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    whole = language.prompts(4) if module is language else module.images(family).repeat(2, 1, 1, 1)
    labels = whole if module is language else torch.tensor([0, 3, 2, 1])
    halves = [t.chunk(RANKS)[rank] for t in (whole, labels)]
    out, wanted = model(halves[0], labels=halves[1]), expected(whole, labels=labels)
    torch.testing.assert_close(out.logits, wanted.logits.chunk(RANKS)[rank])
    out.loss.backward()
    wanted.loss.backward()
    gradients = dict(expected.named_parameters())
    for name, parameter in model.named_parameters():
        wished = gradients[name].grad
        if wished is not None:
            torch.testing.assert_close(parameter.grad.full_tensor(), wished, msg=lambda text, n=name: f"{n}: {text}")
    if module is language:
        tokens = language.greedy(model, language.prompts(), 4)
        assert torch.equal(tokens, language.greedy(expected, language.prompts(), 4))
