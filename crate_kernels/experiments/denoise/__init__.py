"""``denoise``: an attention-only transformer on a mixture of low-rank Gaussians, layer by layer."""
