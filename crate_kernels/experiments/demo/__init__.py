"""``demo``: train a CRATE on real digits, compare it with the naive form, and draw its internals."""
