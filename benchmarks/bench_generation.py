"""Tokens per second of generation: on caches, against running the whole window again for every token.

    python benchmarks/bench_generation.py --model crate_lm_base --batch 1 --prompt 128 --new 128

Recomputing is what the published code does. Both texts are compared before anything is reported.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from crate_kernels import models


def seconds(model, prompt: torch.Tensor, new: int, use_cache: bool) -> tuple[float, torch.Tensor]:
    """Time one generation on an idle device."""
    synchronise = torch.cuda.synchronize if prompt.is_cuda else lambda: None
    synchronise()
    start = time.perf_counter()
    text = model.generate(prompt, new, temperature=0, use_cache=use_cache)
    synchronise()
    return time.perf_counter() - start, text


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help="a language model's name; each of the three base ones if none")
    parser.add_argument("--layers", type=int, help="fewer layers than published")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--new", type=int, default=128, help="tokens")
    parser.add_argument("--repeat", type=int, default=3, help="the median of so many runs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    args = parser.parse_args()
    print(f"{args.device}, {torch.get_num_threads()} CPU threads, {args.dtype}, torch {torch.__version__}")
    print(f"{'model':24} {'cached':>12} {'recomputed':>12} {'ratio':>7}  same text")
    for name in args.model or ("crate_lm_base", "crate_lm_overcomplete_12l", "tost_lm_base"):
        torch.manual_seed(0)
        options = {} if args.layers is None else {"n_layer": args.layers}
        model = models.create(name, **options).to(args.device, getattr(torch, args.dtype))
        prompt = torch.randint(50257, (args.batch, args.prompt), device=args.device)
        rates, texts = [], []
        for use_cache in (True, False):
            seconds(model, prompt, 2, use_cache)
            runs = [seconds(model, prompt, args.new, use_cache) for _ in range(args.repeat)]
            rates.append(args.batch * args.new / statistics.median(taken for taken, _ in runs))
            texts.append(runs[0][1])
        same = float((texts[0] == texts[1]).double().mean())
        print(f"{name:24} {rates[0]:8.1f} t/s {rates[1]:8.1f} t/s {rates[0] / rates[1]:6.2f}x  {100 * same:.1f}%")


if __name__ == "__main__":
    main()
