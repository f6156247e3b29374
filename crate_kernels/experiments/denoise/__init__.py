"""``denoise``: an attention-only transformer on a mixture of low-rank Gaussians, layer by layer."""

from crate_kernels.experiments.common.command import Experiment

from .settings import PRESETS

_EXPERIMENT = Experiment("denoise", PRESETS, "20 seconds", ops=("mssa",))
add_arguments, run = _EXPERIMENT.add_arguments, _EXPERIMENT.run

__all__ = ["add_arguments", "run"]
