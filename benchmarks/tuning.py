"""Single kernels as tuning timed them: the table of docs/gpu.md, from ``tuning.jsonl`` beside a GPU's results."""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmarks import cells, profiled
from crate_kernels.bench.rows import Results


@dataclass(frozen=True)
class Kernel:
    """A workload of ``crate_kernels/ops/<op>/triton/tune.py``.

    Attributes:
        name: in the table.
        workload: in ``tuning.jsonl``.
        shape: of its tokens.
        counted: its work, in words.
        flops: of its products; 0 where it is bound by memory.
        passes: tensors of ``shape`` in 16 bits that it moves.
    """

    name: str
    workload: str
    shape: tuple[int, ...]
    counted: str
    flops: int = 0
    passes: int = 0

    @property
    def bytes(self) -> int:
        """Return the bytes that it moves."""
        return 2 * self.passes * math.prod(self.shape)


def _dense(direction: str, factor: int, head_dim: int) -> Kernel:
    batch, nheads, seqlen = 10, 12, 4096
    flops = factor * batch * nheads * seqlen**2 * head_dim
    workload = f"mssa_{direction} head_dim {head_dim} seqlen longer full 16-bit"
    return Kernel(f"`mssa` {direction}", workload, (batch, nheads, seqlen, head_dim), f"{factor} N² D a head", flops)


def _decode(head_dim: int) -> Kernel:
    workload = f"mssa_decode head_dim {head_dim} seqlen 16 16-bit"
    return Kernel("`mssa` decode", workload, (16, 12, 8193, head_dim), "the cache once", passes=1)


def _tssa(batch: int, seqlen: int, passes: int) -> Kernel:
    bucket = 256 if seqlen == 196 else "longer"
    workload = f"tssa_full_forward head_dim 768 seqlen {bucket} 16-bit"
    return Kernel("`tssa` forward", workload, (batch, 16, seqlen, 48), f"{passes} passes over `w`", passes=passes)


_TOKENS, _DIM = 25216, 768
_ISTA = "ista_product head_dim 768 seqlen longer 16-bit"
KERNELS = (
    *(_dense(direction, factor, d) for direction, factor in (("forward", 4), ("backward", 10)) for d in (64, 128)),
    *(_decode(head_dim) for head_dim in (64, 128)),
    _tssa(222, 196, 2),
    _tssa(10, 4096, 4),
    Kernel("`ista` product", _ISTA, (_TOKENS, _DIM), "2 T dim²", 2 * _TOKENS * _DIM * _DIM),
)


def seconds(results: Results) -> dict[str, float]:
    """Return the time of each workload's fastest configuration in the last run that timed it; empty without a file."""
    last: dict[str, tuple[int, float]] = {}
    for found in profiled.lines(results, "tuning.jsonl"):
        run, fastest = last.get(found["workload"], (0, 0.0))
        if found["seconds"]:
            fastest = min(fastest, found["seconds"]) if run == found["run"] else found["seconds"]
            last[found["workload"]] = found["run"], fastest
    return {workload: fastest for workload, (_, fastest) in last.items()}


def table(results: Results) -> str:
    """Render the time and the rate of each kernel, beside the rate of a stream or of a product of PyTorch's."""
    timed, lines = seconds(results), []
    product, stream = results.machine["product_flops"]["bf16"], profiled.stream_bytes(results)
    for kernel in KERNELS:
        if kernel.workload in timed:
            time = timed[kernel.workload]
            rate = (
                [f"{kernel.flops / time / 1e12:.0f} TFLOP/s", f"{product / 1e12:.0f}"]
                if kernel.flops
                else [f"{kernel.bytes / time / 1e12:.2f} TB/s", f"{stream / 1e12:.2f}"]
            )
            shape = f"({', '.join(map(str, kernel.shape))})"
            lines.append([kernel.name, shape, f"{1e6 * time:.0f}", kernel.counted, *rate])
    return cells.markdown(["kernel", "tokens", "us", "counted", "rate", "PyTorch's product or sum"], lines)


def over_pytorch(results: Results) -> dict[str, float]:
    """Return the rate of each kernel as a multiple of a stream's or a product's of PyTorch, by name and shape."""
    timed = seconds(results)
    if not timed:
        return {}
    product, stream = results.machine["product_flops"]["bf16"], profiled.stream_bytes(results)
    return {
        f"{kernel.name.replace('`', '')} ({', '.join(map(str, kernel.shape))})": (
            kernel.flops / product if kernel.flops else kernel.bytes / stream
        )
        / timed[kernel.workload]
        for kernel in KERNELS
        if kernel.workload in timed
    }
