"""Swap the modules of a published model for fused ones."""

from crate_kernels._patch.api import PatchReport, patch, unpatch

__all__ = ["PatchReport", "patch", "unpatch"]
