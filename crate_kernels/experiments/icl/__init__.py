"""``icl``: linear regression in context, by attention alone and by a standard transformer."""

from crate_kernels.experiments.common.command import Experiment

from .settings import PRESETS

_EXPERIMENT = Experiment("icl", PRESETS, "6 minutes", ops=("mssa",))
add_arguments, run = _EXPERIMENT.add_arguments, _EXPERIMENT.run

__all__ = ["add_arguments", "run"]
