"""``mae``: a CRATE-MAE on real digits: its reconstructions, and linear probes of its features."""

from crate_kernels.experiments.common.command import Experiment

from .settings import PRESETS

_EXPERIMENT = Experiment("mae", PRESETS, "4 minutes", ops=("mssa", "ista"))
add_arguments, run = _EXPERIMENT.add_arguments, _EXPERIMENT.run

__all__ = ["add_arguments", "run"]
