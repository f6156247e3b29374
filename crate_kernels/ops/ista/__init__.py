"""Sparse coding: one proximal step with a complete dictionary, several with an overcomplete one."""

from crate_kernels.ops.ista.api import ista, ista_overcomplete

__all__ = ["ista", "ista_overcomplete"]
