"""``mae``: a CRATE-MAE on real digits: its reconstructions, and linear probes of its features."""
