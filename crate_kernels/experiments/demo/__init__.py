"""``demo``: train a CRATE on real digits, compare it with the naive form, and draw its internals."""

from .command import add_arguments, run

__all__ = ["add_arguments", "run"]
