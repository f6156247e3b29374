"""``language``: causal CRATE, ToST and AoT, byte by byte, on the English of Python's documentation."""

from crate_kernels.experiments.common.command import Experiment

from .settings import PRESETS

_EXPERIMENT = Experiment("language", PRESETS, "4 minutes", ops=("mssa", "tssa", "ista"))
add_arguments, run = _EXPERIMENT.add_arguments, _EXPERIMENT.run

__all__ = ["add_arguments", "run"]
