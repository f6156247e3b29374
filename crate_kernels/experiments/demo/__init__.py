"""``demo``: train a CRATE on real digits, hold it against the naive form, and draw what is inside."""

from .command import add_arguments, run

__all__ = ["add_arguments", "run"]
