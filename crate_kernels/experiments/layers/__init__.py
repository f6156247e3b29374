"""``layers``: compression and sparsity, layer by layer, while a CRATE is trained."""

from crate_kernels.experiments.common.command import Experiment

from .settings import PRESETS

_EXPERIMENT = Experiment("layers", PRESETS, "1 minute", ops=("mssa", "ista"))
add_arguments, run = _EXPERIMENT.add_arguments, _EXPERIMENT.run

__all__ = ["add_arguments", "run"]
