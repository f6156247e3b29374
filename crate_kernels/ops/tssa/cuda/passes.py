"""Launches the passes of token statistics as CUDA C++ kernels.

A sequence is on chip (the full form); or one launch goes through it (the causal form, whose backward takes two); or it
is in chunks, a launch a step, with a scan of the chunks' sums between two steps.
"""

from __future__ import annotations

from ctypes import c_int
from typing import Any, NamedTuple

import torch
from torch import Tensor

from crate_kernels._core import operator
from crate_kernels._core.op_checks import contiguous
from crate_kernels._cuda import launch, records
from crate_kernels._cuda.launch import Kernel, Shape
from crate_kernels._cuda.records import Parameter
from crate_kernels.ops.tssa import op_checks
from crate_kernels.ops.tssa.call import Saved, State, TSSACall
from crate_kernels.ops.tssa.cuda.forms import LaunchForm, causal_backward_bytes, choose
from crate_kernels.ops.tssa.cuda.names import DBIAS, SCAN, causal_steps, full_steps, resident
from crate_kernels.ops.tssa.cuda.parameters import TssaBackward, TssaForward, TssaProblem, TssaSums, tokens
from crate_kernels.ops.tssa.sums import saved_sums

_TOTAL, _BEFORE, _BEHIND = range(3)  # TssaScan
_SCAN_COLUMNS, _SCAN_PARTS = 32, 16  # of a block of the scan
_DBIAS_THREADS = 256


class _PassLaunch(NamedTuple):
    """One launch of a pass."""

    kernel: Kernel
    shape: Shape
    parameters: list[Parameter]


def _run(steps: list[_PassLaunch], device: torch.device) -> None:
    """Launch steps in their order; all are compiled before the first writes."""
    for step in steps:
        if step.shape.blocks:
            launch.function(step.kernel, device, records.records(step.parameters))
    for step in steps:
        launch.run(*step, device)


def _scan(
    p: TssaProblem, sums: Tensor | None, scan: int, channels: Tensor | None = None, by_head: Tensor | None = None
):
    """Scan the chunks' sums in place, from ``channels`` and ``by_head`` on, which become the totals; from 0 without."""
    assert sums is not None
    size = sums.shape[-1]
    a = TssaSums(sums=sums, nchunks=p.nchunks, size=size, scan=scan, channels=channels, by_head=by_head, heads=p.nheads)
    threads = _SCAN_COLUMNS * _SCAN_PARTS
    return _PassLaunch(SCAN, Shape(p.nsequences * -(-size // _SCAN_COLUMNS), threads, 8 * threads), [a])


def _empty_sums(w: Tensor, p: TssaProblem, form: LaunchForm, by_channel: int = 1) -> Tensor | None:
    """Allocate the sums of every chunk and, behind them, of the sequence; None where that is not cut."""
    if not form.cuts:
        return None
    return w.new_empty((p.nsequences, p.nchunks + 1, by_channel * p.width + p.nheads), dtype=torch.float32)


def _sums(w: Tensor, p: TssaProblem, form: LaunchForm) -> list[Tensor | None]:
    """Allocate the sums of chunks of two steps, or what clusters that share sequences exchange."""
    if form.persistent is not None and form.persistent.counters:
        counters = w.new_zeros(form.persistent.counters, dtype=torch.int32)
        return [w.new_empty(form.persistent.exchanged, dtype=torch.float32), counters]
    return [_empty_sums(w, p, form) for _ in range(2)]


def _full(
    p: TssaProblem, form: LaunchForm, a: TssaForward | TssaBackward, sums: list[Tensor | None], backward: bool
) -> list[_PassLaunch]:
    """List the launches of the full form."""
    if form.persistent is not None:
        return [_PassLaunch(form.persistent.kernel, form.persistent.shape, [a])]
    parameters = [a, c_int(p.dtype)]
    if form.cluster:
        shape = Shape(p.nsequences * form.cluster, form.threads, form.shared_bytes, form.cluster)
        return [_PassLaunch(resident(form.access, backward), shape, parameters)]
    shape = Shape(p.nsequences * p.nchunks, form.threads, form.shared_bytes)
    first, second, third = (_PassLaunch(kernel, shape, parameters) for kernel in full_steps(form.access, backward))
    return [first, _scan(p, sums[0], _TOTAL), second, _scan(p, sums[1], _TOTAL), third]


def _causal_forward(
    p: TssaProblem, form: LaunchForm, a: TssaForward, sums: list[Tensor | None], state: State | None
) -> list[_PassLaunch]:
    """List the launches of the causal forward."""
    if form.persistent is not None:
        return [_PassLaunch(form.persistent.kernel, form.persistent.shape, [a])]
    parameters, blocks = [a, c_int(p.dtype)], p.nsequences * p.nchunks
    energy, members, output = (
        _PassLaunch(kernel, Shape(blocks, form.threads), parameters) for kernel in causal_steps(form.access, False)
    )
    members = members._replace(shape=Shape(blocks, form.threads, form.shared_bytes))
    if not form.cuts:
        return [members]
    initial = (None, None, None) if state is None else state[:3]
    scans = _scan(p, sums[0], _BEFORE, initial[0]), _scan(p, sums[1], _BEFORE, *initial[1:])
    return [energy, scans[0], members, scans[1], output]


def _causal_backward(p: TssaProblem, form: LaunchForm, a: TssaBackward, sums: list[Tensor | None]) -> list[_PassLaunch]:
    """List the launches of the causal backward, but for that of the bias."""
    vectors = p.width // form.channels
    if form.persistent is not None:
        return [_PassLaunch(form.persistent.kernel, form.persistent.shape, [a])]
    shared = 0, vectors * 4, form.shared_bytes, causal_backward_bytes(p, form.channels, logits=False)
    totals, dmoment, dlogit, dw = (
        _PassLaunch(kernel, Shape(p.nsequences * p.nchunks, form.threads, shared_bytes), [a, c_int(p.dtype)])
        for kernel, shared_bytes in zip(causal_steps(form.access, True), shared, strict=True)
    )
    if not form.cuts:
        return [dlogit, dw]
    scans = _scan(p, sums[0], _BEFORE), _scan(p, sums[1], _BEHIND), _scan(p, sums[2], _BEHIND)
    return [totals, scans[0], dmoment, scans[1], dlogit, scans[2], dw]


def forward(
    w: Tensor, temp: Tensor, denom_bias: Tensor | None, call: TSSACall, causal: bool, state: State | None = None
) -> tuple[Tensor, ...]:
    """Return out, membership and energy and moment, or, in the causal form, the sums that ``call`` asks for.

    ``state`` is advanced, and then the former two are all.
    """
    if state is not None:
        op_checks.decode(w, temp, denom_bias, state, call.key_padding_mask)
        for name, tensor in state._asdict().items():
            contiguous("tssa", f"cache.{name}", tensor)
    else:
        op_checks.forward_causal(w, temp, denom_bias, call)
    p, form = choose(w, None, call, causal, decoding=state is not None)
    out, membership = operator.empty_out(w), call.empty_membership(w)
    statistics = () if causal else (call.empty_channels(w), call.empty_channels(w))
    sums, saved = _sums(w, p, form), None
    if p.sums_every:
        sums[0] = saved = call.empty_sums(w)
        if call.packed:  # a shorter sequence has no sums at the last places
            saved.zero_()
    energy, moment = statistics or (None, None)
    a = TssaForward(
        **_shared(p, Saved(w, temp, denom_bias, membership, energy, moment), call, sums),
        out=tokens(out, call),
    )
    if state is not None:
        a.state_energy, a.state_moment, a.state_mass, a.lengths = state
    _run(_causal_forward(p, form, a, sums, state) if causal else _full(p, form, a, sums, False), w.device)
    if state is not None:
        if form.cuts:  # else the kernel counts
            state.advance(w, call.key_padding_mask)
        return out, membership
    if causal:
        statistics = (saved_sums(w, membership, call) if saved is None else saved,)
    return out, membership, *statistics


def _shared(p: TssaProblem, saved: Saved, call: TSSACall, sums: list[Tensor | None]) -> dict[str, Any]:
    """Return the parameters that both directions have."""
    bias = saved.denom_bias
    p.temp = saved.temp
    return {
        "problem": p,
        "w": tokens(saved.w, call),
        "membership": saved.membership,
        "energy": saved.energy,
        "moment": saved.moment,
        "bias": bias,
        "bias_tokens": 0 if bias is None else bias.shape[1],
        "sums_1": sums[0],
        "sums_2": sums[1],
    }


def backward(
    dout: Tensor, dmembership: Tensor | None, saved: Saved, call: TSSACall, causal: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return dw, dtemp and, with a bias, its gradient."""
    w, temp, denom_bias, membership, energy, moment, saved_before = saved
    if energy is None or moment is None:
        assert saved_before is not None
        op_checks.backward_causal(dout, dmembership, w, temp, denom_bias, membership, call)
        op_checks.saved_sums(saved_before, w, call)
        statistics = (saved_before,)
    else:
        op_checks.backward(dout, dmembership, w, temp, membership, energy, moment, call)
        statistics = energy, moment
    p, form = choose(w, dout, call, causal, statistics)
    dw = operator.empty_out(w)
    dlogit = call.empty_membership(w) if form.cuts or causal else None
    if not causal:
        sums = [*_sums(w, p, form), None]
    elif form.persistent is not None:
        step = form.cluster * p.chunk_size
        sums = [saved_before if p.sums_every else call._replace(sums_every=step).empty_sums(w), None, None]
    else:
        sums = [_empty_sums(w, p, form, by_channel=2), *(_empty_sums(w, p, form) for _ in range(2))]
    if sums[2] is None:
        dtemp = written = w.new_empty((p.nsequences, p.nheads), dtype=torch.float32)
    else:
        dtemp, written = sums[2][:, -1, p.width :], None
    a = TssaBackward(
        **_shared(p, saved, call, sums),
        dout=tokens(dout, call),
        dw=tokens(dw, call),
        dmembership=dmembership,
        dtemp=written,
        dlogit=dlogit,
        sums_3=sums[2],
    )
    steps, dbias = _causal_backward(p, form, a, sums) if causal else _full(p, form, a, sums, True), None
    if denom_bias is not None:
        dbias = torch.empty_like(denom_bias)
        steps.append(_PassLaunch(DBIAS, Shape(-(-dbias.numel() // _DBIAS_THREADS), _DBIAS_THREADS), [a, dbias]))
    _run(steps, w.device)
    return dw, dtemp.sum(0), dbias
