"""AoT for language, and the GPT-2 it is compared with: causal, tied head, learned positions.

Parameters without the positions, as the paper's Table 4 counts them, and what it says:

- aot_lm_mssa_base 101,868,544 (102M), aot_lm_mssa_medium 182,401,280 (182M)
- aot_lm_mhsa_base 122,165,120 (122M)
- gpt2_base 123,587,328 (124M; with positions 124,373,760)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from crate_kernels import _checks
from crate_kernels.models._base import ReferenceModel, run
from crate_kernels.models.aot.layers import Layer, check_shape, init_language


@dataclass(frozen=True)
class AoTLMConfig:
    """What a language AoT is.

    Attributes:
        n_layer, n_head, n_embd: layers, subspaces, width of a token.
        attention: ``"mssa"``, or ``"mhsa"`` for ordinary attention.
        vocab_size: number of tokens. block_size: the longest sequence.
        mlp: whether an MLP follows each attention, which makes it a GPT-2.
        eta: step size of the attention; dropout: rate in and after it.
        init_std: deviation of the initial weights: 0.02, GPT-2's, suits its width; narrow models want more.
        grad_checkpointing: recompute each layer in the backward instead of keeping its activations.
        backend: of MSSA; None is the best available.

    Raises:
        ValueError, TypeError: a value that cannot be.
    """

    n_layer: int
    n_head: int
    n_embd: int
    attention: str = "mssa"
    vocab_size: int = 50304
    block_size: int = 1024
    mlp: bool = False
    eta: float = 1.0
    dropout: float = 0.0
    init_std: float = 0.02
    grad_checkpointing: bool = False
    backend: str | None = None

    def __post_init__(self) -> None:
        names = ("n_layer", "n_head", "n_embd", "vocab_size", "block_size")
        check_shape("AoTLM", self, names, "n_embd", "n_head")
        _checks.number("AoTLM", "init_std", self.init_std, minimum=0.0)


SIZES = {
    "aot_lm_mssa_base": AoTLMConfig(24, 16, 1024),
    "aot_lm_mssa_medium": AoTLMConfig(36, 20, 1280),
    "aot_lm_mhsa_base": AoTLMConfig(24, 14, 896, attention="mhsa"),
    "gpt2_base": AoTLMConfig(12, 12, 768, attention="mhsa", mlp=True),
}


class AoTLM(ReferenceModel):
    """Predict the next token with attention alone.

    No code was published; the frame is nanoGPT's without biases, as the other language models' here. Parameters:
    ``wte.weight`` (vocab_size, n_embd), which is also the head, ``wpe.weight`` (block_size, n_embd),
    ``layers.{i}.*`` as in ``Layer``, ``norm.weight``.

    Args:
        config: what to build; ``crate_kernels.models.create`` has the published ones by name.
    """

    config_class = AoTLMConfig

    def __init__(self, config: AoTLMConfig) -> None:
        super().__init__(config)
        c = config
        self.wte = nn.Embedding(c.vocab_size, c.n_embd)
        self.wpe = nn.Embedding(c.block_size, c.n_embd)
        self.dropout = nn.Dropout(_checks.number("AoTLM", "dropout", c.dropout, minimum=0.0, below=1.0))
        options = {"eta": c.eta, "mlp": c.mlp, "dropout": c.dropout, "causal": True, "backend": c.backend}
        self.layers = nn.ModuleList(Layer(c.n_embd, c.n_head, c.attention, **options) for _ in range(c.n_layer))
        self.norm = nn.LayerNorm(c.n_embd, bias=False)
        init_language(self, self.layers, c.init_std)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, seqlen, vocab_size) of the token after each of (batch, seqlen).

        Raises:
            ValueError: more tokens than ``block_size``.
        """
        if tokens.dim() != 2 or tokens.shape[1] > self.config.block_size:
            wanted = f"(batch, seqlen <= {self.config.block_size})"
            raise ValueError(f"AoTLM: tokens must be {wanted}, got {tuple(tokens.shape)}")
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.dropout(x)
        for layer in self.layers:
            x = run(self.config.grad_checkpointing, layer, x)
        return self.norm(x) @ self.wte.weight.mT


Config, Model = AoTLMConfig, AoTLM
SYSTEMS: dict = {}  # no code, no checkpoints
