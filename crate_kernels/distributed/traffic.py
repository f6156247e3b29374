"""Bytes that a rank sends, by formula."""

from __future__ import annotations

from typing import NamedTuple

import torch

from crate_kernels._core import checks, operator
from crate_kernels.distributed import layout


class Traffic(NamedTuple):
    """Bytes that the first rank, which has the most tokens, sends in one call.

    Attributes:
        forward, backward: of this library's operator.
        separate_forward, separate_backward: of attention with a query, key and value of the same sizes, cut alike;
            None for ``tssa``, which has no such twin.
    """

    forward: int
    backward: int
    separate_forward: int | None
    separate_backward: int | None


@checks.suggesting
def traffic(
    op: str, shape: tuple[int, int, int, int], ranks: int, form: str, *, dtype: torch.dtype = torch.bfloat16
) -> Traffic:
    """Count the bytes that a rank sends in one call, forward and backward.

    An all-gather counts the own part once per other rank, an all-to-all what leaves the rank, and an all-reduce of n
    bytes 2 n (ranks - 1) / ranks, as a ring sends it. Padding masks and outputs other than ``out`` are not counted.

    With X = batch * nheads * own tokens * head_dim numbers and P ranks, ``mssa`` sends

    - "heads": 2 X (P - 1) / P each way, for separate tensors 4: query, key, value and output.
    - "gather" and "ring": X (P - 1) forward, and (2 + 3 / head_dim) X (P - 1) backward: w and dout, and three
      numbers a row. Separate tensors send 2 forward and 4 backward: key and value, and the gradients of both.

    Args:
        op: "mssa" or "tssa".
        shape: (batch, nheads, seqlen, head_dim) of the whole sequence.
        ranks: number of processes.
        form: a form of ``mssa``; "full" or "causal" of ``tssa``.
        dtype: dtype of the tokens; statistics have float32 at least.

    Returns:
        The bytes.

    Raises:
        TypeError, ValueError: an operator, form or number that does not exist.
    """
    forms = {"mssa": ("heads", "gather", "ring"), "tssa": ("full", "causal")}
    if op not in forms:
        raise ValueError(f"traffic: op must be one of {', '.join(forms)}, got {op!r}")
    if form not in forms[op]:
        raise ValueError(f"traffic: form must be one of {', '.join(forms[op])} of {op}, got {form!r}")
    checks.integer("traffic", "ranks", ranks, minimum=1)
    batch, nheads, seqlen, head_dim = (checks.integer("traffic", "shape", size, minimum=0) for size in shape)
    lengths = layout.split(seqlen, ranks, False).lengths
    number, statistic = dtype.itemsize, operator.stat_dtype(dtype).itemsize
    per_token = batch * nheads * head_dim * number
    others = ranks - 1
    if op == "tssa":
        channels, heads = batch * nheads * head_dim * statistic, batch * nheads * statistic
        if form == "full":
            total = [2 * message * others // ranks for message in (channels, channels + heads)]
            return Traffic(sum(total), 2 * total[0], None, None)
        sent = others * (2 * channels + heads)
        return Traffic(sent, sent, None, None)
    if form == "heads":
        if nheads % ranks:
            raise ValueError(f"traffic: ranks must divide heads in form 'heads', got {ranks} ranks and {nheads} heads")
        there, back = (per_token * count // ranks for count in (lengths[0] * others, seqlen - lengths[0]))
        # Separate: query, key and value there, the output back; then the gradients the other way.
        return Traffic(there + back, there + back, 3 * there + back, there + 3 * back)
    # Around a ring pass the tokens of all ranks but the next one.
    tokens = others * lengths[0] if form == "gather" else seqlen - lengths[1 % ranks]
    sent = tokens * per_token
    numbers = 3 * tokens * batch * nheads * statistic
    return Traffic(sent, 2 * sent + numbers, 2 * sent, 4 * sent)
