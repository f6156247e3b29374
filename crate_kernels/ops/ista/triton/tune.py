"""The calls that ``python -m crate_kernels tune`` times for ista: products by tile or by the library, steps by form."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from crate_kernels._triton.table import LaunchRow, Table
from crate_kernels._triton.tune import Prepared, Workload
from crate_kernels.ops.ista import composite
from crate_kernels.ops.ista.call import ISTACall
from crate_kernels.ops.ista.triton import launch as kernels
from crate_kernels.ops.ista.triton import tables
from crate_kernels.ops.ista.triton.product import Epilogue, product

_STEP, _THRESHOLD = 0.1, 0.01


def _draw(*shape: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape) + shape[-1])
    dtype = torch.float16 if device == "cpu" else torch.bfloat16  # which the interpreter cannot do
    return torch.randn(*shape, generator=generator).to(device, dtype)


def _product(tokens: int, inner: int, columns: int, device: str = "cuda") -> Callable[[], Prepared]:
    """Return what prepares the last product of a step, with all of its epilogue."""

    def make() -> Prepared:
        left, base = _draw(tokens, inner, device=device), _draw(tokens, columns, device=device)
        right = _draw(inner, columns, device=device) * inner**-0.5

        def call() -> Tensor:
            return product(left, right, Epilogue(_STEP, base, threshold=_THRESHOLD))

        def plain(dtype: torch.dtype) -> dict[str, Tensor]:
            update = left.to(dtype) @ right.to(dtype)
            return {"out": torch.relu(base.to(dtype) + _STEP * update - _THRESHOLD)}

        return Prepared(call, lambda: {"out": call()}, plain, left.dtype)

    return make


def _linear(
    tokens: int, inner: int, columns: int, is_gated: bool = False, device: str = "cuda"
) -> Callable[[], Prepared]:
    """Return what prepares a product of a backward pass: it has an addend, and a gate or a transposed matrix."""

    def make() -> Prepared:
        left, base = _draw(tokens, inner, device=device), _draw(tokens, columns, device=device)
        right = (_draw(columns, inner, device=device) * inner**-0.5).t()
        gate = None
        if is_gated:
            right, gate = right.contiguous(), base.flip(0).relu()

        def call() -> Tensor:
            return product(left, right, Epilogue(_STEP, base, gate=gate))

        def plain(dtype: torch.dtype) -> dict[str, Tensor]:
            out = base.to(dtype) + _STEP * (left.to(dtype) @ right.to(dtype))
            return {"out": out if gate is None else torch.where(gate == 0, 0, out)}

        return Prepared(call, lambda: {"out": call()}, plain, left.dtype)

    return make


def _form(table: Table, tokens: int, dim: int, device: str = "cuda") -> Callable[[], Prepared]:
    """Return what prepares a step, forward or backward as ``table`` has it."""

    def make() -> Prepared:
        x, dy = _draw(tokens, dim, device=device), _draw(1, tokens, dim, device=device)[0]
        weight = _draw(dim, dim, device=device) * dim**-0.5
        call = ISTACall(_STEP, _THRESHOLD / _STEP, True, x.dtype)
        y = kernels.forward(x, weight, call)

        def step(on: ModuleType, dtype: torch.dtype) -> dict[str, Tensor]:
            tokens, dictionary, own = x.to(dtype), weight.to(dtype), call._replace(compute=dtype)
            if table is tables.FORWARD_FORM:
                return {"y": on.forward(tokens, dictionary, own)}
            dx, dweight = on.backward(dy.to(dtype), tokens, dictionary, y.to(dtype), True, True, own)
            return {"dx": dx, "dweight": dweight}

        run = partial(step, kernels, x.dtype)
        return Prepared(run, run, partial(step, composite), x.dtype)

    return make


def workloads() -> list[Workload]:
    """List what is timed: the widths of CRATE and of its overcomplete codes, from one token to a batch, in bf16."""
    found = []
    for inner, columns in ((384, 384), (768, 768), (1536, 384), (3072, 768)):
        for tokens, bucket in ((1, 16), (788, 1024), (25216, None)):
            row = LaunchRow({}, inner, bucket, half=True)
            found.append(Workload(tables.PRODUCT, row, _product(tokens, inner, columns)))
            found.append(Workload(tables.LINEAR, row, _linear(tokens, inner, columns)))
            if inner == columns:  # a gate is of codes, four times as wide
                found.append(Workload(tables.GATED, row, _linear(tokens, inner, 4 * columns, is_gated=True)))
    # Around the number of tokens at which either form is as many FLOP.
    for dim in (384, 576, 768, 1024):
        for tokens in (256, 512, 1024, 2048):
            for table in (tables.FORWARD_FORM, tables.BACKWARD_FORM):
                row = LaunchRow({}, dim, tokens, half=True)
                found.append(Workload(table, row, _form(table, tokens, dim)))
    return found
