"""Train a language model on a text file, in one process or under torchrun, and resume a run that was stopped.

    python examples/train_language.py --text book.txt
    torchrun --nproc-per-node 4 examples/train_language.py --text book.txt --sequence 2
    torchrun --nproc-per-node 8 --max-restarts 3 examples/train_language.py --text train.bin --vocab 50304 \
        --model crate_lm_base --context 1024 --batch 256 --dtype bfloat16 --recompute

Processes form a mesh (data, sequence, tensor): those of one ``sequence`` group share each text, those of one ``tensor``
group each layer, and groups have different texts. ``fully_shard`` divides weights, gradients and optimiser among the
others. OUT/metrics.jsonl has a line per step, OUT/step-N a checkpoint, OUT/model the model at the end, for
``models.from_pretrained``. The same command resumes from the last checkpoint, on any number of processes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from training import cutting, figures, loop, processes
from training.loop import Batches, Task
from training.processes import Processes

from crate_kernels import models

SMALL = {"n_layer": 6, "n_head": 6, "n_embd": 384}
EVALUATED = 4  # batches


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [name for name in models.names() if name.startswith(("crate_lm_", "tost_lm_", "aot_lm_mssa_"))]
    parser.add_argument("--text", type=Path, required=True, help="a file; its bytes are the tokens")
    parser.add_argument(
        "--vocab", type=loop.count, default=256, help="above 256, the file has tokens of 16 bits instead"
    )
    parser.add_argument("--model", choices=names, help="a published size; default: a causal CRATE of 6 layers")
    parser.add_argument("--layers", type=loop.count, help="instead of the size's, as the next two")
    parser.add_argument("--heads", type=loop.count)
    parser.add_argument("--width", type=loop.count)
    parser.add_argument("--context", type=loop.count, default=256, help="tokens of a text")
    parser.add_argument("--sequence", type=loop.count, default=1, help="processes that share a text")
    loop.add_options(parser, lr=1e-3, batch=16)
    return parser.parse_args(arguments)


def build(args: argparse.Namespace) -> Any:
    """Build the model, the same in all processes."""
    changes = {"n_layer": args.layers, "n_head": args.heads, "n_embd": args.width}
    sizes = {} if args.model else SMALL
    sizes = {**sizes, **{name: value for name, value in changes.items() if value is not None}}
    torch.manual_seed(args.seed)
    options = {"block_size": args.context, "vocab_size": args.vocab, "grad_checkpointing": args.recompute}
    return models.create(args.model or "crate_lm_base", **sizes, **options)


class Text:
    """A file of tokens, which is mapped into memory and not read as a whole; its last twentieth is held out.

    Args:
        path: the file.
        vocab: number of tokens; up to 256, a token is a byte.
        context: tokens of a text.
    """

    def __init__(self, path: Path, vocab: int, context: int) -> None:
        width = 1 if vocab <= 256 else 2
        size = path.stat().st_size // width
        self.context, self.vocab = context, vocab
        self.held_out = max(size // 20, context + 1)
        self.learnt = size - self.held_out
        if self.learnt <= context:
            raise SystemExit(
                f"--text must have more than {2 * context + 1} tokens with --context {context}, got {size}"
            )
        dtype = torch.uint8 if width == 1 else torch.int16
        self.tokens = torch.from_file(str(path), shared=False, size=size, dtype=dtype)

    def drawn(self, count: int, seed: int, own: slice, held_out: bool = False) -> tuple[Tensor, Tensor]:
        """Return tokens and the next ones, (own, context) each, of ``own`` among ``count`` places drawn by ``seed``."""
        first, available = (self.learnt, self.held_out) if held_out else (0, self.learnt)
        generator = torch.Generator().manual_seed(seed)
        starts = first + torch.randint(available - self.context, (count,), generator=generator)[own]
        texts = self.tokens[starts[:, None] + torch.arange(self.context + 1)].long() & 0xFFFF
        if texts.numel() and texts.max() >= self.vocab:
            raise SystemExit(f"--vocab {self.vocab} must be above all tokens, got {texts.max()}")
        return texts[:, :-1].contiguous(), texts[:, 1:].contiguous()


def loss(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy; over a ``sequence`` group, the model cuts the texts itself."""
    return model(tokens, targets)[1]


def prepare(args: argparse.Namespace, placed: Processes) -> Task:
    """Return the task of these options on these processes."""
    text = Text(args.text, args.vocab, args.context)
    model = build(args)
    flops, settings = (
        figures.flops(model, args.context),
        asdict(model.config) | {"batch": args.batch, "seed": args.seed},
    )
    for free in ("grad_checkpointing", "backend"):
        del settings[free]
    # Half precision has three digits: the loss is taken in float32.
    model.lm_head.register_forward_hook(lambda _, __, out: out.to(torch.promote_types(out.dtype, torch.float32)))
    model = cutting.cut(model, model.transformer["h"], placed, args.dtype)
    share = args.batch // placed.groups
    own = slice(placed.group * share, (placed.group + 1) * share)

    def batches(step: int) -> Batches:
        while True:
            yield text.drawn(args.batch, args.seed * 1_000_003 + step, own)
            step += 1

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        model.eval()
        drawn = (text.drawn(args.batch, seed, own, held_out=True) for seed in range(EVALUATED))
        losses = [placed.mean(loss(model, *(x.to(placed.device) for x in batch))) for batch in drawn]
        return {"held_out_loss": sum(losses) / len(losses)}

    return Task(model, placed, batches, loss, evaluate, "tokens", args.batch * args.context, flops, settings)


def main(arguments: Sequence[str] | None = None) -> None:
    args = options(arguments)
    with processes.started() as device:
        shape = {"sequence": args.sequence, "tensor": args.tensor, "replicas": args.replicas}
        loop.run(args, prepare(args, processes.placed(device, args.batch, **shape)))


if __name__ == "__main__":
    main()
