"""The public operators over several processes: validation, and choice of form and backend."""

from __future__ import annotations

from typing import Literal, NoReturn, overload

import torch
from torch import Tensor

from crate_kernels._core import backends, checks, operator
from crate_kernels.distributed import collectives, heads, rows, token_stats
from crate_kernels.distributed.collectives import Group
from crate_kernels.ops.mssa import rectangular
from crate_kernels.ops.tssa import api as tssa_api

_PHI = ("softmax", "threshold", "relu", "identity")
FORMS = ("heads", "gather", "ring")
_OWN_LAYOUT = "(batch, nheads, own tokens, head_dim)"


@overload
def mssa(
    w: Tensor,
    group: Group,
    *,
    form: str | None = ...,
    causal: bool = ...,
    balanced: bool = ...,
    scale: float | None = ...,
    dropout_p: float = ...,
    phi: str = ...,
    threshold: float | None = ...,
    key_padding_mask: Tensor | None = ...,
    seqlen: int | None = ...,
    return_lse: Literal[False] = False,
    backend: str | None = ...,
) -> Tensor: ...
@overload
def mssa(
    w: Tensor,
    group: Group,
    *,
    form: str | None = ...,
    causal: bool = ...,
    balanced: bool = ...,
    scale: float | None = ...,
    dropout_p: float = ...,
    phi: str = ...,
    threshold: float | None = ...,
    key_padding_mask: Tensor | None = ...,
    seqlen: int | None = ...,
    return_lse: Literal[True],
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...
@checks.closed
def mssa(
    w: Tensor,
    group: Group,
    *,
    form: str | None = None,
    causal: bool = False,
    balanced: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    phi: str = "softmax",
    threshold: float | None = None,
    key_padding_mask: Tensor | None = None,
    seqlen: int | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend to a sequence of which each rank has a part: ``crate_kernels.mssa``.

    Sends half of the bytes that attention with separate query, key and value sends: ``traffic`` counts them.

    Args:
        w: this rank's projected tokens, (batch, nheads, own tokens, head_dim). Ranks may have any numbers of tokens, 0
            included, unless ``balanced`` or ``seqlen`` say which.
        group: the process group, or a DeviceMesh of one dimension.
        form: "heads" exchanges tokens for heads, attends to the whole sequence, and exchanges back; the number of
            ranks must divide that of heads. "gather" keeps each rank's rows and fetches all tokens; "ring" fetches one
            rank's at a time, which takes the smallest memory. None is "heads" where ranks divide heads, else "gather".
        causal: each token attends to itself and those before it only.
        balanced: ranks have the head-tail chunks of ``shard(..., balanced=True)``: with ``causal``, equal work in
            the forms "gather" and "ring". "heads" has equal work always.
        scale: factor of the scores, head_dim ** -0.5 by default.
        dropout_p: probability in [0, 1) with which an attention weight is dropped, with the masks that the kernels
            draw in one process. The seed comes from the first rank's generator.
        phi: as in ``crate_kernels.mssa``; the forms "gather" and "ring" have "softmax" alone.
        threshold: as in ``crate_kernels.mssa``.
        key_padding_mask: (batch, own tokens) bool of this rank's tokens, True = keep.
        seqlen: length of the whole sequence, if ranks have what ``shard`` gives them; by default the ranks are asked,
            which waits for the device.
        return_lse: also return the logsumexp of the scores of this rank's tokens.
        backend: as in ``crate_kernels.mssa``; the forms "gather" and "ring" do not have "reference".

    Returns:
        ``out`` of this rank's tokens, or ``(out, lse)``, as ``crate_kernels.mssa`` returns them.

    Raises:
        TypeError, ValueError: an argument that does not fit.
        RuntimeError: the requested backend is unavailable.
        NotImplementedError: what a form or backend does not have, a double backward, or forward-mode AD.
    """
    if unknown:
        checks.no_keyword(mssa, unknown)
    checks.tensor("mssa", "w", w, 4, _OWN_LAYOUT)
    for name, value in (("causal", causal), ("balanced", balanced), ("return_lse", return_lse)):
        checks.flag("mssa", name, value)
    ranks = collectives.ranks("mssa", group)
    form = _form(form, w.shape[1], ranks.size)
    factor = (w.shape[-1] or 1) ** -0.5 if scale is None else checks.number("mssa", "scale", scale)
    dropout_p = checks.number("mssa", "dropout_p", dropout_p, minimum=0.0, below=1.0)
    if key_padding_mask is not None:
        checks.padding_mask("mssa", key_padding_mask, w)
    _check_phi(phi, threshold, return_lse)
    if w.dtype != torch.float64:
        w = w.to(operator.autocast_dtype(w) or w.dtype)
    name = "" if form == "heads" else _of_rows(w, form, phi, backend)
    where = ranks.layout("mssa", w.shape[2], balanced, seqlen, w.device)
    masks = None
    if key_padding_mask is not None:
        masks = [mask.bool() for mask in ranks.gather(key_padding_mask.to(torch.uint8), where.lengths, dim=1)]
    seed = ranks.draw_seed(w.device) if dropout_p else None

    if form == "heads":
        options = {"causal": causal, "scale": factor, "phi": phi, "threshold": threshold}
        options.update(return_lse=return_lse, backend=backend)
        mask = None if masks is None else where.join(masks, 1)
        out, lse = heads.attend(w, heads.HeadsCall(ranks, where, mask, options, dropout_p, seed))
    else:
        attention = rectangular.RectangularCall(causal=causal, scale=factor, seed=seed, dropout_p=dropout_p)
        call = rows.RowsCall(ranks, where, form == "ring", masks, attention, name)
        out, lse = rows.RowsFunction.apply(w, call)  # pyright: ignore
    return (out, lse) if return_lse else out  # pyright: ignore[reportReturnType]


def _form(form: str | None, nheads: int, size: int) -> str:
    """Resolve the form."""
    if form is None:
        return "heads" if nheads % size == 0 else "gather"
    if form not in FORMS:
        raise ValueError(f"mssa: form must be None or one of {', '.join(FORMS)}, got {form!r}")
    if form == "heads" and nheads % size:
        raise ValueError(
            f"mssa: ranks must divide heads in form 'heads', got {size} ranks and {nheads} heads; use form='gather'"
        )
    return form


def _check_phi(phi: str, threshold: float | None, return_lse: bool) -> None:
    if phi not in _PHI:
        raise ValueError(f"mssa: phi must be one of {', '.join(_PHI)}, got {phi!r}")
    if (phi == "threshold") != (threshold is not None):
        wanted = "given with" if phi == "threshold" else "None without"
        raise ValueError(f"mssa: threshold must be {wanted} phi='threshold', got {threshold!r}")
    if threshold is not None:
        checks.number("mssa", "threshold", threshold, minimum=0.0)
    if return_lse and phi in ("relu", "identity"):
        raise ValueError(f"mssa: return_lse must be False with phi={phi!r}, which has no softmax")


def _of_rows(w: Tensor, form: str, phi: str, backend: str | None) -> str:
    """Return the backend of the forms "gather" and "ring"; refuse what they do not have."""
    if phi != "softmax":
        raise NotImplementedError(f"mssa: phi must be 'softmax' in form {form!r}, got {phi!r}; use form='heads'")
    if backend is not None:
        backends.resolve("mssa", backend, w.device, w.dtype)  # names what there is not for one process either
        if backends.unavailable_reason(rectangular.PART, backend, w.device.type):
            raise NotImplementedError(f"mssa: backend={backend!r} does not have form {form!r}; use form='heads'")
    name = backends.resolve(rectangular.PART, backend, w.device, w.dtype, "mssa")
    checks.transforms("mssa", name, w)
    return backends.to_op_arg(name, backend)


@overload
def tssa(
    w: Tensor,
    temp: Tensor,
    group: Group,
    *,
    causal: bool = ...,
    denom_bias: Tensor | None = ...,
    dropout_p: float = ...,
    key_padding_mask: Tensor | None = ...,
    seqlen: int | None = ...,
    return_membership: Literal[False] = False,
    backend: str | None = ...,
) -> Tensor: ...
@overload
def tssa(
    w: Tensor,
    temp: Tensor,
    group: Group,
    *,
    causal: bool = ...,
    denom_bias: Tensor | None = ...,
    dropout_p: float = ...,
    key_padding_mask: Tensor | None = ...,
    seqlen: int | None = ...,
    return_membership: Literal[True],
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...
@checks.closed
def tssa(
    w: Tensor,
    temp: Tensor,
    group: Group,
    *,
    causal: bool = False,
    denom_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    key_padding_mask: Tensor | None = None,
    seqlen: int | None = None,
    return_membership: bool = False,
    backend: str | None = None,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend through second moments to a sequence of which each rank has a part: ``crate_kernels.tssa``.

    Only sums over tokens are sent, two messages forward and two backward, whatever the length. Ranks have consecutive
    parts of the sequence, of any lengths, 0 included. The gradients of ``temp`` and ``denom_bias`` are each rank's part
    of a sum over ranks.

    Args:
        w: this rank's projected tokens, (batch, nheads, own tokens, head_dim).
        temp: temperature of each head, (nheads,) or (nheads, 1), the same in all ranks.
        group: the process group, or a DeviceMesh of one dimension.
        causal: the causal form.
        denom_bias: (nheads, >= seqlen) or (nheads, >= seqlen, 1) of the whole sequence, causal only.
        dropout_p: probability in [0, 1) with which 1 / (1 + M) is dropped, with the masks of one process. The seed
            comes from the first rank's generator.
        key_padding_mask: (batch, own tokens) bool of this rank's tokens, True = keep.
        seqlen: length of the whole sequence, if ranks have what ``shard`` gives them. By default the ranks are asked
            where it is needed (``denom_bias``, causal dropout), which waits for the device.
        return_membership: also return Pi of this rank's tokens.
        backend: None or "composite", the one that there is for several processes.

    Returns:
        ``out`` of this rank's tokens, or ``(out, membership)``, as ``crate_kernels.tssa`` returns them.

    Raises:
        TypeError, ValueError: an argument that does not fit.
        NotImplementedError: another backend, a double backward, or forward-mode AD.
    """
    if unknown:
        checks.no_keyword(tssa, unknown)
    checks.tensor("tssa", "w", w, 4, _OWN_LAYOUT)
    checks.flag("tssa", "causal", causal)
    checks.flag("tssa", "return_membership", return_membership)
    ranks = collectives.ranks("tssa", group)
    temp = tssa_api.per_head("temp", temp, w, w.shape[1])
    dropout_p = checks.number("tssa", "dropout_p", dropout_p, minimum=0.0, below=1.0)
    if key_padding_mask is not None:
        checks.padding_mask("tssa", key_padding_mask, w)
    if denom_bias is not None and not causal:
        raise ValueError("tssa: denom_bias must be None with causal=False")
    name = backends.resolve("tssa", backend, w.device, w.dtype) if backend is not None else "composite"
    if name != "composite":
        raise NotImplementedError(f"tssa: backend must be None or 'composite' over several processes, got {name!r}")
    checks.transforms("tssa", name, w, temp, denom_bias)

    start = 0
    if denom_bias is not None or (causal and dropout_p) or seqlen is not None:
        where = ranks.layout("tssa", w.shape[2], False, seqlen, w.device)
        (own,) = where.ranges(ranks.rank)
        start = own.start
        if denom_bias is not None:
            denom_bias = _denom_bias(denom_bias, w, where.seqlen)[:, own.start : own.stop]
    seed = ranks.draw_seed(w.device) if dropout_p else None
    call = token_stats.StatsCall(ranks, key_padding_mask, seed, dropout_p, start)
    if causal:
        out, membership = token_stats.Causal.apply(w, temp, denom_bias, call)  # pyright: ignore
    else:
        out, membership = token_stats.Full.apply(w, temp, call)  # pyright: ignore
    return (out, membership) if return_membership else out


def _denom_bias(value: Tensor, w: Tensor, seqlen: int) -> Tensor:
    """Require (nheads, >= seqlen[, 1]) of the whole sequence; return (nheads, >= seqlen)."""
    checks.tensor("tssa", "denom_bias", value, None, "(nheads, >= seqlen)")
    bias = value.squeeze(2) if value.dim() == 3 and value.shape[2] == 1 else value
    if bias.dim() != 2 or bias.shape[0] != w.shape[1] or bias.shape[1] < seqlen:
        wanted = f"tssa: denom_bias must be (nheads, >= seqlen[, 1]) = ({w.shape[1]}, >= {seqlen})"
        raise ValueError(f"{wanted} of the whole sequence, got {tuple(value.shape)}")
    tssa_api.check_parameter("denom_bias", value, w)
    return bias
