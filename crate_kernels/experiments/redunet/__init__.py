"""``redunet``: networks built forward by rate reduction, on the book's two examples."""

from crate_kernels.experiments.common.command import Experiment

from .settings import PRESETS

_EXPERIMENT = Experiment("redunet", PRESETS, "30 seconds")
add_arguments, run = _EXPERIMENT.add_arguments, _EXPERIMENT.run

__all__ = ["add_arguments", "run"]
