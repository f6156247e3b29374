"""The forward and backward passes of sparse coding, written once for all backends.

Each backend is an engine, which computes the products. It also decides when a step takes one product with
K = W - W^T W rather than two, the dtype of products, the work fused into them, and the order in which a result is
scaled and rounded. Derivations are in ``reference.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from crate_kernels.ops.ista import op_checks
from crate_kernels.ops.ista.call import ISTACall, OvercompleteCall


class Upstream(NamedTuple):
    """The gradient of a step's output, as it is added to the gradient of its input."""

    masked: Tensor  # dy where y is not zero, in any dtype
    dy: Tensor
    y: Tensor


class Engine:
    """The parts of a pass, as one backend computes them. Rows are (tokens, width); ``out`` None: a new tensor.

    Engines take parameters' types from here, as checkers infer those of an overriding method.
    """

    # The gradient of a residual is multiplied by step_size where it is added, not where it is computed.
    scales_late = False
    # Dtype of the sums over tokens in a step of ``ista``; None: that of the products.
    sum_dtype: torch.dtype | None = None

    def rows(self, t: Tensor) -> Tensor:
        """View tokens as contiguous rows; copy them if they are not."""
        return flat(t).contiguous()

    def product_dtype(self, compute: torch.dtype, rows: int) -> torch.dtype:
        """Return the dtype of products that are asked for in ``compute``, of ``rows`` rows on the left."""
        return compute

    def operand(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Return tokens as the left operand of products in ``dtype``."""
        return cast(tokens, dtype)

    def one_product(self, tokens: Tensor) -> bool:
        """Return whether the forward takes one product of the tokens, with K = W - W^T W, rather than two."""
        return tokens.shape[0] >= tokens.shape[1]

    def one_product_back(self, tokens: Tensor, need_dx: bool, need_dweight: bool) -> bool:
        """Return whether the backward takes the one-product form.

        It saves 3 products with the tokens and costs 2 of dim^3; for either gradient alone, 1 and 1.
        """
        saved, squares = (3, 2) if need_dx and need_dweight else (1, 1)
        return saved * tokens.shape[0] >= squares * tokens.shape[1]

    def gram(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return K = W - W^T W, formed in weight's dtype or better and rounded once."""
        weight = cast(weight, torch.promote_types(weight.dtype, dtype))
        return cast(torch.addmm(weight, weight.t(), weight, alpha=-1), dtype)

    def through_gram(self, dgram: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of W from that of K: dK - W (dK + dK^T)."""
        dtype = self.product_dtype(weight.dtype, weight.shape[0])
        dgram = cast(dgram, dtype)
        return cast(torch.addmm(dgram, cast(weight, dtype), self.plus_transpose(dgram), alpha=-1), weight.dtype)

    def plus_transpose(self, square: Tensor) -> Tensor:
        """Return a square matrix plus its transpose."""
        return square + square.t()

    def mm(self, left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
        """Return left @ right by the library; ``out`` may be written, and is the result then."""
        return torch.mm(left, right, out=out)

    def step(
        self,
        left: Tensor,
        right: Tensor,
        base: Tensor | None,
        call: ISTACall | OvercompleteCall,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return shrink(base + step_size * left @ right), in base's dtype, by the threshold of the call."""
        raise NotImplementedError

    def product(
        self,
        left: Tensor,
        right: Tensor,
        base: Tensor | None = None,
        scale: float = 1.0,
        gate: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return base + scale * left @ right, zero where ``gate`` is zero, in right's dtype."""
        raise NotImplementedError

    def mask(self, dy: Tensor, y: Tensor, call: ISTACall, dtype: torch.dtype) -> Tensor:
        """Return dy where y is not zero: in dy's dtype, or rounded to ``dtype`` for the products."""
        raise NotImplementedError

    def input_gradient(
        self, upstream: Upstream, left: Tensor, right: Tensor, scale: float, base: Tensor | None = None
    ) -> Tensor:
        """Return the masked dy + scale * left @ right, or + scale * (base - left @ right), in dy's dtype."""
        raise NotImplementedError

    def add_product(self, total: Tensor | None, left: Tensor, right: Tensor, scale: float) -> Tensor:
        """Return total + scale * left @ right; ``total`` may be written."""
        product = self.product(left, right, scale=scale)
        return product if total is None else total.add_(product)

    def sum_over_tokens(self, left: Tensor, right: Tensor, scale: float, dtype: torch.dtype | None) -> Tensor:
        """Return scale * left^T @ right in ``dtype``."""
        product = scaled(left.t(), right, scale)
        return product if dtype is None else cast(product, dtype)

    def add_over_tokens(self, total: Tensor, left: Tensor, right: Tensor, scale: float) -> Tensor:
        """Add scale * left^T @ right to ``total``, in place."""
        if total.dtype == left.dtype:
            return total.addmm_(left.t(), right, alpha=scale)
        return total.add_(scaled(left.t(), right, scale))


def flat(t: Tensor) -> Tensor:
    """View tokens as rows; copy them if no view is possible."""
    return t.flatten(0, -2) if t.dim() > 1 else t.unsqueeze(0)


def cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``t.to(dtype)``, in a quarter of its time where there is nothing to do."""
    return t if t.dtype == dtype else t.to(dtype)


def scaled(left: Tensor, right: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
    """Return scale * left @ right, scaled before it is rounded: a sum over all tokens may be beyond fp16 unscaled."""
    # beta = 0: the first argument is not read.
    return torch.addmm(left.new_empty(()), left, right, beta=0, alpha=scale, out=out)


def forward(engine: Engine, x: Tensor, weight: Tensor, call: ISTACall) -> Tensor:
    """Return y; the residual is added in x's dtype or better."""
    tokens = engine.rows(x)
    dtype = engine.product_dtype(call.compute, tokens.shape[0])
    left = engine.operand(tokens, dtype)
    if engine.one_product(tokens):
        right = engine.gram(weight, dtype)
    else:
        right = cast(weight, dtype)
        left = engine.product(left, right.t(), left, -1.0)
    return engine.step(left, right, tokens, call).view(x.shape)


def backward(
    engine: Engine, dy: Tensor, x: Tensor, weight: Tensor, y: Tensor, need_dx: bool, need_dweight: bool, call: ISTACall
) -> tuple[Tensor, Tensor]:
    """Return dx and dweight; an empty tensor for the one not needed."""
    tokens = engine.rows(x)
    dtype = engine.product_dtype(call.compute, tokens.shape[0])
    dy, y = engine.rows(dy), engine.rows(y)
    upstream = Upstream(engine.mask(dy, y, call, dtype), dy, y)
    g, left = cast(upstream.masked, dtype), engine.operand(tokens, dtype)
    dx = dweight = None
    if engine.one_product_back(tokens, need_dx, need_dweight):
        if need_dx:
            dx = engine.input_gradient(upstream, g, engine.gram(weight, dtype).t(), call.step_size)
        if need_dweight:
            dgram = engine.sum_over_tokens(cast(left, dtype), g, call.step_size, engine.sum_dtype)
            dweight = engine.through_gram(dgram, weight)
    else:
        early, late = _early_and_late(engine, call)
        matrix = cast(weight, dtype)
        dr = engine.product(g, matrix.t(), scale=early)  # gradient of the residual x - x W^T
        if need_dx:
            dx = engine.input_gradient(upstream, dr, matrix, late, base=dr)
        if need_dweight:
            residual = engine.product(left, matrix.t(), left, -1.0)
            dweight = engine.sum_over_tokens(residual, g, call.step_size, engine.sum_dtype)
            dweight = cast(engine.add_over_tokens(dweight, dr, cast(left, dtype), -late), weight.dtype)
    return x.new_empty(0) if dx is None else dx.view(x.shape), weight.new_empty(0) if dweight is None else dweight


def each_dweight(dy: Tensor, x: Tensor, weight: Tensor, y: Tensor, call: ISTACall) -> Tensor:
    """Return dweight of each sample (samples, ..., dim), in the form of fewer multiplications: (samples, dim, dim)."""
    left, g = (t.flatten(1, -2) if t.dim() > 2 else t.unsqueeze(1) for t in (x, torch.where(y != 0, dy, 0)))
    left, g, eta = cast(left, call.compute), cast(g, call.compute), call.step_size
    dtype, nothing = torch.promote_types(weight.dtype, torch.float32), left.new_empty(())
    if 3 * left.shape[1] < left.shape[2]:  # 4 products of the tokens, against one of them and a product of W
        matrix = cast(weight, call.compute)
        residual, dr = left - left @ matrix.t(), g @ matrix.t()
        dweight = torch.baddbmm(nothing, residual.mT, g, beta=0, alpha=eta)
        return cast(cast(dweight, dtype) - torch.baddbmm(nothing, dr.mT, left, beta=0, alpha=eta), weight.dtype)
    dgram = cast(torch.baddbmm(nothing, left.mT, g, beta=0, alpha=eta), dtype)
    # W S = (S W^T)^T, for S = dK + dK^T is symmetric: one product with the rows of all samples.
    dweight = dgram - ((dgram + dgram.mT) @ cast(weight, dgram.dtype).t()).mT
    return cast(dweight, weight.dtype)


def forward_overcomplete(
    engine: Engine, x: Tensor, weight: Tensor, decoder: Tensor | None, keep: bool, call: OvercompleteCall
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, the codes z_1..z_steps and the residuals r_1..; the latter two empty unless ``keep``."""
    tokens, steps = engine.rows(x), call.steps
    dtype = engine.product_dtype(x.dtype, tokens.shape[0])
    tokens, matrix = cast(tokens, dtype), cast(weight, dtype)
    codes = x.new_empty((steps, tokens.shape[0], weight.shape[1]) if keep else 0)
    residuals = x.new_empty((steps - 1, *tokens.shape) if keep else 0)
    in_place = keep and x.dtype == dtype  # the codes that are saved are those that are computed with
    transposed = matrix.t()
    code, residual = None, tokens  # z_0 = 0 makes r_0 = x: the first step is one product
    for t in range(steps):
        if code is not None:
            residual = engine.product(code, transposed, tokens, -1.0, out=residuals[t - 1] if in_place else None)
        code = engine.step(residual, matrix, code, call, out=codes[t] if in_place else None)
        if keep and not in_place:
            codes[t] = code
            if t:
                residuals[t - 1] = residual
    assert code is not None
    out = engine.mm(code, (matrix if decoder is None else cast(decoder, dtype)).t())
    return cast(out, x.dtype).view(x.shape), codes, residuals


def backward_overcomplete(
    engine: Engine,
    dout: Tensor,
    x: Tensor,
    weight: Tensor,
    decoder: Tensor | None,
    codes: Tensor,
    residuals: Tensor,
    call: OvercompleteCall,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx, dweight and ddecoder; the last empty where the decoder is ``weight``."""
    tokens = engine.rows(x)
    dtype = engine.product_dtype(x.dtype, tokens.shape[0])
    early, late = _early_and_late(engine, call)
    tokens, dout, matrix = cast(tokens, dtype), cast(engine.rows(dout), dtype), cast(weight, dtype)
    # Half weights sum in their own dtype: sums in float32 would be as many bytes again as the products write. A
    # float32 weight beside half tokens gets a float32 sum of half products.
    sums = torch.promote_types(weight.dtype, dtype)
    code = cast(codes[-1], dtype)
    ddecoder, dweight = weight.new_empty(0), engine.sum_over_tokens(dout, code, 1.0, sums)
    if decoder is not None:
        ddecoder, dweight = cast(dweight, decoder.dtype), None
    dcode = engine.product(dout, matrix if decoder is None else cast(decoder, dtype), gate=code)
    dx, transposed = None, matrix.t()
    for t in range(call.steps - 1, -1, -1):
        residual = cast(residuals[t - 1], dtype) if t else tokens
        if dweight is None:
            dweight = engine.sum_over_tokens(residual, dcode, call.step_size, sums)
        else:
            dweight = engine.add_over_tokens(dweight, residual, dcode, call.step_size)
        if t:
            code = cast(codes[t - 1], dtype)
            dr = engine.product(dcode, transposed, scale=early)
            dweight = engine.add_over_tokens(dweight, dr, code, -late)
            dcode = engine.product(dr, matrix, dcode, -late, gate=code)
            dx = dr if dx is None else dx.add_(dr)
    assert dweight is not None
    dx = engine.add_product(dx, dcode, transposed, early)
    if late != 1.0:
        dx = dx.mul_(late)
    return cast(dx, x.dtype).view(x.shape), cast(dweight, weight.dtype), ddecoder


def _early_and_late(engine: Engine, call: ISTACall | OvercompleteCall) -> tuple[float, float]:
    """Return the factors of a residual's gradient: of the product that it is, and of what it is added to."""
    return (1.0, call.step_size) if engine.scales_late else (call.step_size, 1.0)


def passes(step: Callable[[Tensor], Engine], overcomplete: Callable | None = None) -> tuple[Callable, ...]:
    """Return forward, backward, forward_overcomplete and backward_overcomplete of a backend.

    ``step(x)`` and ``overcomplete(x)``, by default the same, return the engine of a call on such tokens.
    """
    overcomplete = overcomplete or step

    def bind(engine_of: Callable[[Tensor], Engine], run: Callable, check: Callable, x: int) -> Callable:
        def call(*args: Any) -> Any:
            check(*args)
            return run(engine_of(args[x]), *args)

        return call

    return (
        bind(step, forward, op_checks.forward, x=0),
        bind(step, backward, op_checks.backward, x=1),
        bind(overcomplete, forward_overcomplete, op_checks.forward_overcomplete, x=0),
        bind(overcomplete, backward_overcomplete, op_checks.backward_overcomplete, x=1),
    )
