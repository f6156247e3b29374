"""``classify``: CRATE and its variants, CRATE-alpha, ToST and AoT, trained alike on real digits."""
