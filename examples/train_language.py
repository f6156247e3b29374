"""Train a language model on a text file, in one process or under torchrun, and go on where a run was stopped.

    python examples/train_language.py --text book.txt
    torchrun --nproc-per-node 4 examples/train_language.py --text book.txt --sequence 2

Processes form a mesh (data, sequence): those of one ``sequence`` group share each text, groups have other texts.
Weights, gradients and optimiser are cut over all processes by ``fully_shard``. The batches depend on the seed and the
step alone, so that any number of processes computes the same losses. Metrics are in OUT/metrics.jsonl, checkpoints in
OUT/step-N.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from crate_kernels import distributed, models


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="a file; its bytes are the tokens")
    parser.add_argument("--out", type=Path, default=Path("train-output"), help="metrics and checkpoints")
    parser.add_argument("--model", choices=("crate_lm", "tost_lm"), default="crate_lm", help="the family")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--context", type=int, default=256, help="tokens of a text")
    parser.add_argument("--batch", type=int, default=16, help="texts per step, of all processes")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--schedule", type=int, help="steps of the schedule; default: --steps")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=50)
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient")
    parser.add_argument("--sequence", type=int, default=1, help="processes that share a text")
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--recompute", action="store_true", help="recompute activations in the backward")
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "float64"), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def start(sequence: int, batch: int) -> tuple[torch.device, DeviceMesh]:
    """Join the processes that torchrun started, or be the only one; return the device and the mesh."""
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    size = dist.get_world_size()
    if size % sequence or batch % (size // sequence):
        raise SystemExit(f"--sequence {sequence} must divide {size} processes, and the groups --batch {batch}")
    return device, init_device_mesh(device.type, (size // sequence, sequence), mesh_dim_names=("data", "sequence"))


def build(args: argparse.Namespace, device: torch.device, mesh: DeviceMesh) -> Any:
    """Build the model, the same in all processes, and cut it."""
    torch.manual_seed(args.seed)
    sizes = {"n_layer": args.layers, "n_head": args.heads, "n_embd": args.width, "block_size": args.context}
    config, kind = (
        (models.CRATELMConfig, models.CRATELM) if args.model == "crate_lm" else (models.ToSTLMConfig, models.ToSTLM)
    )
    model: Any = kind(config(**sizes, vocab_size=256, grad_checkpointing=args.recompute))
    model = model.to(device, torch.float64 if args.dtype == "float64" else torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if args.dtype == "bfloat16" else None)
    flat = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.transformer["h"]:
        fully_shard(block, mesh=flat, mp_policy=policy)
    fully_shard(model, mesh=flat, mp_policy=policy)
    return distributed.sequence_parallel(model, mesh["sequence"])


def texts(data: Tensor, args: argparse.Namespace, step: int, mesh: DeviceMesh) -> Tensor:
    """Return this group's part of the texts of a step, (texts, context + 1)."""
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    starts = torch.randint(len(data) - args.context, (args.batch,), generator=generator)
    own = starts.tensor_split(mesh["data"].size())[mesh["data"].get_local_rank()]
    return data[own[:, None] + torch.arange(args.context + 1)].long()


def rate(args: argparse.Namespace, step: int) -> float:
    """Return the learning rate: linear warm-up, then half a cosine down to a tenth."""
    steps = args.schedule or args.steps
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    done = (step - args.warmup) / max(1, steps - args.warmup)
    return args.lr * (0.55 + 0.45 * math.cos(math.pi * min(1.0, done)))


def save(folder: Path, model: nn.Module, optimiser: torch.optim.Optimizer, step: int) -> None:
    """Write a checkpoint aside, and rename it when all processes are done: one that has its name is whole."""
    aside = folder / "unfinished"
    if dist.get_rank() == 0:
        shutil.rmtree(aside, ignore_errors=True)  # of a run that was killed meanwhile
    dist.barrier()
    weights, moments = get_state_dict(model, optimiser)
    dcp.save({"model": weights, "optimiser": moments}, checkpoint_id=aside)
    if dist.get_rank() == 0:
        place = folder / f"step-{step}"
        shutil.rmtree(place, ignore_errors=True)
        aside.rename(place)
    dist.barrier()


def load(folder: Path, model: nn.Module, optimiser: torch.optim.Optimizer) -> int:
    """Load the last checkpoint, of any number of processes; return the number of its steps, 0 without one."""
    steps = [int(path.name.removeprefix("step-")) for path in folder.glob("step-*")]
    if not steps:
        return 0
    weights, moments = get_state_dict(model, optimiser)
    dcp.load({"model": weights, "optimiser": moments}, checkpoint_id=folder / f"step-{max(steps)}")
    set_state_dict(model, optimiser, model_state_dict=weights, optim_state_dict=moments)
    return max(steps)


def train(args: argparse.Namespace, device: torch.device, mesh: DeviceMesh) -> None:
    data = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8)
    model = build(args, device, mesh)
    optimiser = torch.optim.AdamW(model.parameter_groups(0.1), lr=args.lr, betas=(0.9, 0.95))
    first = dist.get_rank() == 0
    if first:
        args.out.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    done = load(args.out, model, optimiser)
    path = args.out / "metrics.jsonl"
    if first and path.exists():  # steps after the checkpoint are run again
        lines = path.read_text().splitlines()
        path.write_text("".join(f"{line}\n" for line in lines if json.loads(line)["step"] < done))
    clock = time.perf_counter()
    for step in range(done, args.steps):
        for group in optimiser.param_groups:
            group["lr"] = rate(args, step)
        batch = texts(data, args, step, mesh).to(device)
        _, loss = model(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
        loss.backward()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimiser.step()
        optimiser.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=mesh["data"].get_group())
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if first:
            now = time.perf_counter()
            line = {
                "step": step,
                "loss": mean.item() / mesh["data"].size(),
                "lr": rate(args, step),
                "gradient_norm": norm.item(),
                "tokens_per_second": args.batch * args.context / (now - clock),
            }
            clock = now
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(f"step {step + 1}/{args.steps}  loss {line['loss']:.4f}  {line['tokens_per_second']:.0f} tokens/s")
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            save(args.out, model, optimiser, step + 1)


def main() -> None:
    args = arguments()
    device, mesh = start(args.sequence, args.batch)
    try:
        train(args, device, mesh)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
