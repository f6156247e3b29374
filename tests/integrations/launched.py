"""What ``accelerate launch`` starts in each process: a few steps of a causal CRATE and of a CRATE by Trainer."""

import json
import sys
import tempfile
from pathlib import Path

import torch

from tests.integrations import conftest  # noqa: F401 (torchvision)

torch.set_num_threads(1)
from tests.integrations import test_transformers_train as tests  # noqa: E402


def main(path):
    """Train, and write the norm of every weight."""
    norms = {}
    for family in ("crate_lm", "crate"):
        with tempfile.TemporaryDirectory() as folder:
            run = tests.trainer(family, folder, 2)
            run.args.save_strategy = run.args.eval_strategy = "no"
            run.args.per_device_train_batch_size = run._train_batch_size = 2 // run.args.world_size
            run.train()
            norms.update({f"{family}.{name}": p.norm().item() for name, p in run.model.named_parameters()})
    if run.args.process_index == 0:
        Path(path).write_text(json.dumps({**norms, "processes": run.args.world_size}))


if __name__ == "__main__":
    main(sys.argv[1])
