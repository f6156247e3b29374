"""``layers``: how compression and sparsity come about while a CRATE is trained, layer by layer."""

from crate_kernels.experiments.common.command import Experiment

from .settings import PRESETS

_EXPERIMENT = Experiment("layers", PRESETS, "1 minute", ops=("mssa", "ista"))
add_arguments, run = _EXPERIMENT.add_arguments, _EXPERIMENT.run

__all__ = ["add_arguments", "run"]
