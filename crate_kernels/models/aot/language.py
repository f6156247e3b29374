"""AoT for language, and the GPT-2 of its comparison: causal, tied head, learned positions.

Parameters without the positions, as in the paper's Table 4, with the table's numbers in brackets:

- aot_lm_mssa_base 101,868,544 (102M), aot_lm_mssa_medium 182,401,280 (182M)
- aot_lm_mhsa_base 122,165,120 (122M)
- gpt2_base 123,587,328 (124M; with positions 124,373,760)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import nn

from crate_kernels.models._shared.language import LanguageConfig, LanguageModel
from crate_kernels.models.aot.layers import Layer, check_step, init_language


@dataclass(frozen=True)
class AoTLMConfig(LanguageConfig):
    """Config of a language AoT; its other fields are those of every language model.

    Attributes:
        attention: ``"mssa"``, or ``"mhsa"`` for ordinary attention.
        mlp: add an MLP after each attention, which makes the model a GPT-2.
        eta: step size of the attention.

    Raises:
        ValueError, TypeError: an invalid value.
    """

    attention: str = "mssa"
    mlp: bool = False
    eta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_step("AoTLM", self)


_size = partial(AoTLMConfig, bias=False)
SIZES = {
    "aot_lm_mssa_base": _size(n_layer=24, n_head=16, n_embd=1024),
    "aot_lm_mssa_medium": _size(n_layer=36, n_head=20, n_embd=1280),
    "aot_lm_mhsa_base": _size(n_layer=24, n_head=14, n_embd=896, attention="mhsa"),
    "gpt2_base": _size(attention="mhsa", mlp=True),
}


class AoTLM(LanguageModel):
    """Predict the next token with attention alone.

    No code was published; the frame is that of the other language models. Parameters: ``transformer.wte``,
    ``transformer.wpe``, ``transformer.h.{i}`` as in ``Layer``, ``transformer.ln_f``, ``lm_head``.

    Args:
        config: sizes and options; ``crate_kernels.models.create`` has the published ones by name.
    """

    config_class = AoTLMConfig

    def __init__(self, config: AoTLMConfig) -> None:
        c = config
        options = {"eta": c.eta, "mlp": c.mlp, "bias": c.bias, "dropout": c.dropout, "backend": c.backend}
        layers = (Layer(c.n_embd, c.n_head, c.attention, causal=True, **options) for _ in range(c.n_layer))
        super().__init__(c, layers, nn.LayerNorm(c.n_embd, bias=c.bias))

    def _initialise(self) -> None:
        init_language(self, self.transformer["h"], 0.02)


Config, Model = AoTLMConfig, AoTLM
SYSTEMS: dict = {}  # no code, no checkpoints
