"""The layer of an attention-only transformer (AoT, Wang et al. 2025, arXiv 2506.03790), and a standard one.

A layer denoises the tokens against its subspaces, and does nothing else::

    Z <- Z + eta MSSA(LN(Z))

In the paper's other form MHSA, ordinary attention with its own query, key and value, stands in MSSA's place.
Two such steps, the second an MLP instead of attention, are the layer of a standard transformer.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from crate_kernels import _checks
from crate_kernels.nn import MSSA

_ATTENTIONS = ("mssa", "mhsa")


class MHSA(nn.Module):
    """Ordinary multi-head self-attention, by PyTorch's own: what AoT compares MSSA with.

    Parameters, without biases: ``qkv.weight`` (3 dim, dim), ``to_out.0.weight`` (dim, dim).

    Args:
        dim: width of a token, a multiple of ``heads``.
        heads: number of heads.
        dropout: rate on the probabilities and on the output; default 0.
        causal: whether a token attends only to itself and earlier ones; default False.
    """

    def __init__(self, dim: int, heads: int, dropout: float = 0.0, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = nn.Sequential(nn.Linear(dim, dim, bias=False), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        """Attend over (batch, seqlen, dim)."""
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        rate = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(query, key, value, dropout_p=rate, is_causal=self.causal)
        return self.to_out(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """One layer: ``x + eta attn(norm(x))``, and with ``mlp`` after it ``x + mlp(norm_2(x))``.

    Parameters: ``norm.*``, ``attn.qkv.weight``, ``attn.to_out.0.weight``, and with an MLP ``norm_2.*``,
    ``mlp.{0,2}.weight``.

    Args:
        dim, heads: width of a token and number of subspaces, each of dim / heads.
        attention: ``"mssa"`` or ``"mhsa"``.
        eta: step size; default 1.
        norm: whether the attention sees layer-normalised tokens (language) or bare ones (vision).
        mlp: whether a GELU MLP of four times the width follows: a standard transformer.
        dropout: rate in attention and after it.
        causal: whether a token sees only itself and earlier ones.
        backend: of MSSA; None is the best available.
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
        dropout: float = 0.0,
        causal: bool = False,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.eta = eta
        self.norm = nn.LayerNorm(dim, bias=False) if norm else nn.Identity()
        if attention == "mssa":
            self.attn = MSSA(dim, heads, dim // heads, dropout, bias_out=False, causal=causal, backend=backend)
        else:
            self.attn = MHSA(dim, heads, dropout, causal=causal)
        self.mlp = None
        if mlp:
            self.norm_2 = nn.LayerNorm(dim, bias=False)
            wide, narrow = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)
            self.mlp = nn.Sequential(wide, nn.GELU(), narrow, nn.Dropout(dropout))

    def forward(self, x: Tensor, **attention: object) -> Tensor:
        """Return (batch, seqlen, dim); keyword arguments go to the attention."""
        update = self.attn(self.norm(x), **attention)
        x = x + (update if self.eta == 1.0 else self.eta * update)
        return x if self.mlp is None else x + self.mlp(self.norm_2(x))


def check_shape(owner: str, config: object, names: tuple[str, ...], dim: str, heads: str) -> None:
    """Require the sizes ``names`` of a config to be positive, its heads to divide its width, and what all have."""
    for name in names:
        _checks.integer(owner, name, getattr(config, name), minimum=1)
    width, count = getattr(config, dim), getattr(config, heads)
    if width % count:
        raise ValueError(f"{owner}: {dim} must be a multiple of {heads} = {count}, got {width}")
    attention = getattr(config, "attention")  # noqa: B009  every config has one; no common base says so
    if attention not in _ATTENTIONS:
        raise ValueError(f"{owner}: attention must be one of {', '.join(_ATTENTIONS)}, got {attention!r}")
    for name in ("eta", "dropout"):
        _checks.number(owner, name, getattr(config, name), minimum=0.0)


def init_language(model: nn.Module, layers: nn.ModuleList, std: float) -> None:
    """Draw the weights as GPT-2 does: deviation ``std``, less for what adds to the residual stream."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
    outputs = [p for name, p in layers.named_parameters() if name.endswith(("to_out.0.weight", "mlp.2.weight"))]
    for parameter in outputs:
        nn.init.normal_(parameter, std=std * len(outputs) ** -0.5)
