"""Experiments of the papers with the operators and models: each is a subcommand with its own folder."""

from crate_kernels.experiments.common.command import Experiment

_CRATE, _ALL = ("mssa", "ista"), ("mssa", "tssa", "ista")

# fmt: off
EXPERIMENTS = (
    Experiment("demo", "train a CRATE on real digits, compare it with plain PyTorch, draw what is inside",
               ops=_CRATE, baseline="reference"),
    Experiment("denoise", "SNR of a noisy mixture through attention-only layers, against AoT's theorem and figure",
               "20 seconds", ("mssa",)),
    Experiment("icl", "linear regression in context, by attention alone and by a standard transformer",
               "6 minutes", ("mssa",)),
    Experiment("redunet", "networks built forward by rate reduction: three Gaussians, and digits turned by any angle",
               "30 seconds"),
    Experiment("layers", "coding rate, sparsity, subspaces and tokens of a CRATE, layer by layer, as it is trained",
               "2 minutes", _CRATE),
    Experiment("classify", "CRATE and its variants, CRATE-alpha, ToST and AoT, trained alike on real digits",
               "4 minutes", _ALL),
    Experiment("mae", "what a CRATE-MAE fills into real digits, and what a linear probe reads from it",
               "4 minutes", _CRATE),
    Experiment("language", "causal CRATE, ToST and AoT on English, byte by byte", "4 minutes", _ALL),
)
# fmt: on
