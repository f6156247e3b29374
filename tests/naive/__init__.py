"""The papers' equations as Python loops, in float64: what guards the ``reference`` backend."""

from .ista import ista_loop, ista_overcomplete_loop
from .mssa import mssa_loop
from .philox import philox4x32_10
from .tssa import tssa_causal_loop, tssa_loop

__all__ = [
    "ista_loop",
    "ista_overcomplete_loop",
    "mssa_loop",
    "philox4x32_10",
    "tssa_causal_loop",
    "tssa_loop",
]
