"""``classify``: CRATE and its variants, CRATE-alpha, ToST and AoT, trained alike on real digits."""

from crate_kernels.experiments.common.command import Experiment

from .settings import PRESETS

_EXPERIMENT = Experiment("classify", PRESETS, "4 minutes", ops=("mssa", "tssa", "ista"))
add_arguments, run = _EXPERIMENT.add_arguments, _EXPERIMENT.run

__all__ = ["add_arguments", "run"]
