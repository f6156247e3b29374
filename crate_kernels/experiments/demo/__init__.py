"""``demo``: train a CRATE on real digits, compare it with plain PyTorch, and draw its internals."""
