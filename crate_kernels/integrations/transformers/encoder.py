"""CRATE-MAE without its decoder, with a classifier."""

from __future__ import annotations

from torch import Tensor

from crate_kernels.models._shared import vision
from crate_kernels.models.crate_mae import CRATEMAE, CRATEMAEConfig

# What only the decoder and its loss use; decoder_pos_embed stays, since the encoder adds it.
_LEFT_OUT = ("decoder_embed", "decoder_blocks", "decoder_norm", "decoder_pred", "mask_token", "pos_embed")


class MAEEncoder(CRATEMAE):
    """Classify whole images from the class token of CRATE-MAE's encoder.

    Parameters: those of the encoder under their published names, and ``head.*``.

    Args:
        config: of the CRATE-MAE.
        num_classes: outputs of the head; 0 for none.
    """

    def __init__(self, config: CRATEMAEConfig, num_classes: int) -> None:
        super().__init__(config)
        for name in _LEFT_OUT:
            delattr(self, name)
        self.head = vision.head(config.embed_dim, num_classes)

    def forward_head(self, x: Tensor) -> Tensor:
        """Return logits (batch, num_classes) from the output of ``forward_features``."""
        return self.head(x[:, 0])
