"""AoT for in-context regression: examples of a linear function, read one after the other (Garg et al. 2022).

First the parameters of the layers' matrices, equal to the paper's. Then those of the whole model, with the embedding
table of 50257 words that the paper's Table 5 counts and nothing here reads; the table's number is in brackets:

- aot_icl_mssa 1,048,576; 7,501,441 (7.5M)
- aot_icl_mhsa 2,097,152; 8,550,017 (8.55M)
- transformer_icl 3,145,728; 9,598,593 (9.63M: GPT-2's linear layers have biases, ours have none)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor, nn

from crate_kernels._core import checks
from crate_kernels.models._shared import fields
from crate_kernels.models._shared.base import ReferenceModel, place, run
from crate_kernels.models.aot.layers import Layer, check_step, init_language
from crate_kernels.nn import _symbols


@dataclass(frozen=True)
class AoTRegressionConfig:
    """Config of an in-context AoT.

    Attributes:
        n_dims: dimension of an example.
        dim, depth, heads: width of a token, layers, subspaces.
        attention: ``"mssa"``, or ``"mhsa"`` for ordinary attention.
        n_positions: the longest sequence, with two tokens per example.
        mlp: add an MLP after each attention, as in a standard transformer.
        eta: step size of the attention.
        dropout: rate in and after the attention.
        init_std: deviation of the initial weights: 0.02, as in GPT-2, suits GPT-2's width; narrow models need more.
        grad_checkpointing: recompute each layer in the backward instead of keeping its activations.
        backend: backend of MSSA; None is the best available.

    Raises:
        ValueError, TypeError: an invalid value.
    """

    n_dims: int = 20
    dim: int = 128
    depth: int = 32
    heads: int = 8
    attention: str = "mssa"
    n_positions: int = 101
    mlp: bool = False
    eta: float = 1.0
    dropout: fields.Rate = 0.0
    init_std: float = 0.02
    grad_checkpointing: bool = False
    backend: str | None = None

    def __post_init__(self) -> None:
        fields.check_types("AoTRegression", self)
        checks.multiple("AoTRegression", "dim", self.dim, "heads", self.heads)
        check_step("AoTRegression", self)
        checks.number("AoTRegression", "init_std", self.init_std, minimum=0.0)


SIZES = {
    "aot_icl_mssa": AoTRegressionConfig(),
    "aot_icl_mhsa": AoTRegressionConfig(attention="mhsa"),
    "transformer_icl": AoTRegressionConfig(depth=16, attention="mhsa", mlp=True),
}


class AoTRegression(ReferenceModel):
    """Predict ``f(x_i)`` from ``x_1, f(x_1), .., x_i`` with attention alone, for any linear f.

    Parameters: ``read_in.{weight,bias}``, ``wpe.weight`` (n_positions, dim), ``layers.{i}.*`` as in ``Layer``,
    ``norm.weight``, ``read_out.{weight,bias}``.

    Args:
        config: sizes and options; ``crate_kernels.models.create`` has the published ones by name.
    """

    config_class = AoTRegressionConfig

    def __init__(self, config: AoTRegressionConfig) -> None:
        super().__init__(config)
        c = config
        options = {"eta": c.eta, "mlp": c.mlp, "dropout": c.dropout, "causal": True, "backend": c.backend}
        self.wpe = nn.Embedding(c.n_positions, c.dim)
        self.layers = nn.ModuleList(Layer(c.dim, c.heads, c.attention, **options) for _ in range(c.depth))
        self.norm = nn.LayerNorm(c.dim, bias=False)
        init_language(self, self.layers, c.init_std)
        # Initialised by torch's default, as in the published experiments: only the backbone is GPT-2's.
        self.read_in = nn.Linear(c.n_dims, c.dim)
        self.read_out = nn.Linear(c.dim, 1)

    @checks.closed
    def forward(self, xs: Tensor, ys: Tensor, **unknown: NoReturn) -> Tensor:
        """Return predictions (batch, examples): the i-th from ``xs[:, : i + 1]`` and ``ys[:, :i]``.

        Args:
            xs: (batch, examples, n_dims).
            ys: (batch, examples); the last is not used.

        Raises:
            ValueError: a shape that does not fit, or more tokens than ``n_positions``.
        """
        if isinstance(unknown, dict) and unknown:
            checks.no_keyword(AoTRegression.forward, unknown)
        _symbols.refuse("AoTRegression", xs, ys)
        c = self.config
        if xs.dim() != 3 or xs.shape[-1] != c.n_dims or 2 * xs.shape[1] > c.n_positions:
            wanted = f"(batch, examples <= {c.n_positions // 2}, n_dims={c.n_dims})"
            raise ValueError(f"AoTRegression: xs must be {wanted}, got {tuple(xs.shape)}")
        if ys.shape != xs.shape[:2]:
            raise ValueError(
                f"AoTRegression: ys must be (batch, examples) = {tuple(xs.shape[:2])}, got {tuple(ys.shape)}"
            )
        values = nn.functional.pad(ys.unsqueeze(-1), (0, c.n_dims - 1))
        tokens = torch.stack((xs, values), dim=2).flatten(1, 2)  # x_1, (f(x_1), 0, ..), x_2, ..
        x = self.read_in(tokens) + place(self.wpe, torch.arange(tokens.shape[1], device=xs.device), xs.shape[0])
        for layer in self.layers:
            x = run(c.grad_checkpointing, layer, x)
        # Copied: fully_shard's backward hook on a view is lost if the view is later changed in place.
        return self.read_out(self.norm(x)[:, ::2]).squeeze(-1).clone()


Config, Model = AoTRegressionConfig, AoTRegression
SYSTEMS: dict = {}  # no code, no checkpoints
