"""Experiments of the papers with the operators and models: each is a verb with its own folder."""

SUMMARIES = {
    "demo": "train a CRATE on real digits, compare it with the naive form, draw what is inside",
    "denoise": "SNR of a noisy mixture through attention-only layers, against AoT's theorem and figure",
    "icl": "linear regression in context, by attention alone and by a standard transformer",
    "redunet": "networks built forward by rate reduction: three Gaussians, and digits turned by any angle",
    "layers": "coding rate, sparsity, subspaces and tokens of a CRATE, layer by layer, as it is trained",
    "classify": "CRATE and its variants, CRATE-alpha, ToST and AoT, trained alike on real digits",
    "mae": "what a CRATE-MAE fills into real digits, and what a linear probe reads from it",
    "language": "causal CRATE, ToST and AoT on English, byte by byte",
}
