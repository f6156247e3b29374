"""Published attention modules that are loaded alone, without the model around them."""

from __future__ import annotations

from crate_kernels.models._shared.official import System
from crate_kernels.nn import TSSA, CausalTSSA

SYSTEMS = {
    "tssa_attention": System(
        known=("dim", "num_heads", "qkv_bias", "qk_scale", "attn_drop", "proj_drop", "backend"),
        required=("dim",),
        build=lambda arguments: TSSA(**arguments),
        ours=lambda module: isinstance(module, TSSA),
    ),
    # The published class takes the config of the whole language model.
    "tssa_causal_attention": System(
        known=("n_embd", "n_head", "block_size", "bias", "dropout", "backend"),
        required=("n_embd", "n_head", "block_size"),
        build=lambda arguments: CausalTSSA(**arguments),
        ours=lambda module: isinstance(module, CausalTSSA),
        only={"TSSA": True},
        ignored=("vocab_size", "n_layer"),
    ),
}
