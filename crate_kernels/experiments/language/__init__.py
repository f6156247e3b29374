"""``language``: causal CRATE, ToST and AoT, byte by byte, on the English of Python's documentation."""
