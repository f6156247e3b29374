"""Layer of an attention-only transformer (AoT, Wang et al. 2025, arXiv 2506.03790), and of a standard one.

A layer only denoises the tokens against its subspaces::

    Z <- Z + eta MSSA(LN(Z))

In the paper's other form, MHSA replaces MSSA: ordinary attention with its own query, key and value.
Two such steps, the second with an MLP instead of attention, are the layer of a standard transformer.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from crate_kernels._core import checks
from crate_kernels.models._shared.base import DropPath
from crate_kernels.models.aot.mhsa import MHSA
from crate_kernels.nn import MSSA, _heads, _linear

_ATTENTIONS = ("mssa", "mhsa")


class Layer(nn.Module):
    """One layer: ``x + eta attn(norm(x))``, and with ``mlp`` after it ``x + mlp(norm_2(x))``.

    Parameters: ``norm.*``, ``attn.qkv.weight``, ``attn.to_out.0.weight``, and with an MLP ``norm_2.*``,
    ``mlp.{0,2}.weight``.

    Args:
        dim, heads: width of a token and number of subspaces, each of dim / heads.
        attention: ``"mssa"`` or ``"mhsa"``.
        eta: step size; default 1.
        norm: layer-normalise the attention's input (True for language, False for vision).
        mlp: add a GELU MLP of four times the width, as in a standard transformer.
        bias: give norms and output projections a bias; default False.
        dropout: rate in attention and after it.
        causal: a token sees only itself and earlier ones.
        drop_path: part of the images, or sequences, that skip each of the two in training; default 0.
        backend: backend of MSSA; None is the best available.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        attention: str,
        *,
        eta: float = 1.0,
        norm: bool = True,
        mlp: bool = False,
        bias: bool = False,
        dropout: float = 0.0,
        causal: bool = False,
        drop_path: float = 0.0,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        checks.multiple("Layer", "dim", dim, "heads", heads)
        if attention not in _ATTENTIONS:
            raise ValueError(f"Layer: attention must be one of {', '.join(_ATTENTIONS)}, got {attention!r}")
        self.eta = checks.number("Layer", "eta", eta)
        self.norm = nn.LayerNorm(dim, bias=bias) if norm else nn.Identity()
        if attention == "mssa":
            self.attn = MSSA(dim, heads, dim // heads, dropout, bias_out=bias, causal=causal, backend=backend)
        else:
            self.attn = MHSA(dim, heads, dropout, causal=causal, bias_out=bias)
        self.drop_path = DropPath(checks.number("Layer", "drop_path", drop_path, minimum=0.0, below=1.0))
        self.mlp, self.backend = None, backend
        if mlp:
            self.norm_2 = nn.LayerNorm(dim, bias=bias)
            wide = nn.Linear(dim, 4 * dim, bias)
            narrow = nn.Linear(4 * dim, dim, bias)
            self.mlp = nn.Sequential(wide, nn.GELU(), narrow, nn.Dropout(dropout))

    def forward(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        cache: Any = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        return_attention: bool = False,
        return_key: bool = False,
    ) -> Tensor:
        """Return (batch, seqlen, dim); the mask, the cache and the offsets are passed to the attention.

        With ``return_attention`` or ``return_key``, return the weights or the projection of an MSSA instead.
        """
        if return_attention or return_key:
            if not isinstance(self.attn, MSSA):
                raise NotImplementedError("Layer: attention must be 'mssa' for its weights or projection, got 'mhsa'")
            return self.attn(self.norm(x), return_attention, return_key)
        packing = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        update = self.attn(self.norm(x), key_padding_mask=key_padding_mask, cache=cache, **packing)
        x = x + self.drop_path(update if self.eta == 1.0 else self.eta * update)
        return x if self.mlp is None else x + self.drop_path(_linear.sequence(self.mlp, self.norm_2(x), self.backend))


def check_step(owner: str, config: Any) -> None:
    """Require valid values of the fields that all configs have: attention and eta."""
    if config.attention not in _ATTENTIONS:
        raise ValueError(f"{owner}: attention must be one of {', '.join(_ATTENTIONS)}, got {config.attention!r}")
    checks.number(owner, "eta", config.eta, minimum=0.0)


def init_language(model: nn.Module, layers: nn.Module, std: float) -> None:
    """Draw the weights as GPT-2 does: deviation ``std``, less for the matrices that add to the residual stream."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
    outputs = [p for name, p in layers.named_parameters() if name.endswith(("to_out.0.weight", "mlp.2.weight"))]
    for parameter in outputs:
        nn.init.normal_(parameter, std=std * len(outputs) ** -0.5)


@torch.no_grad()
def start_as_derived(model: nn.Module) -> None:
    """Initialise every MSSA as the operator of the paper, ``sum_k U_k U_k^T Z softmax(Z^T U_k U_k^T Z)``.

    The subspaces U_k are drawn with torch's generator, orthonormal and orthogonal to each other. The output
    projection is their transpose. The model's scale of the scores, which the equation does not have, is absorbed in
    both. If the output projection is drawn independently, it must first learn the directions of the input, which
    takes small models thousands of steps.

    A tied MSSA has no output projection of its own, and becomes gamma / scale times that operator. One head as wide as
    the tokens has none at all: it is refused, and nothing is drawn.

    Args:
        model: an AoT, or any module with ``Layer`` in it; other attention is not changed.

    Raises:
        ValueError: an MSSA of one head without an output projection, or one whose layers were adapted, quantised,
            parametrised or offloaded.
    """
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, MSSA)]
    for name, module in found:
        where = f" in {name}" if name else ""
        if isinstance(module.to_out, nn.Identity):
            raise ValueError(
                f"start_as_derived: MSSA must have an output projection, got none{where}: "
                "one head as wide as the tokens; take two heads or more"
            )
        for layer in (module.qkv, *([] if module.tied else [_output(module)])):
            if not _heads.holds_its_weight(layer) or "weight" not in layer._parameters:
                raise ValueError(
                    f"start_as_derived: MSSA must hold the weights that it applies, got {type(layer).__name__}{where}: "
                    "start before layers are adapted, quantised, parametrised or offloaded"
                )
    for _, module in found:
        unscaled = module.scale**-0.5
        nn.init.orthogonal_(module.qkv.weight).mul_(unscaled)
        if not module.tied:
            _output(module).weight.copy_(module.qkv.weight.mT / unscaled**2)


def _output(module: MSSA) -> nn.Linear:
    """Return the output projection of an MSSA that is not tied."""
    return cast(nn.Linear, cast(nn.Sequential, module.to_out)[0])
