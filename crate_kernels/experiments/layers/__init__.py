"""``layers``: compression and sparsity, layer by layer, while a CRATE is trained."""
