"""Sizes of the experiment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ICLSettings:
    """The tasks, the models and their training.

    Attributes:
        tasks: ``"linear"`` (every weight drawn) and ``"sparse"`` (all but ``nonzeros`` are zero).
        opposite: if True, compare AoT-MSSA with an AoT-MSSA of which every second head has the sign of its scores
            turned, and with AoT-MHSA. Otherwise compare AoT-MSSA, AoT-MHSA and the standard transformer.
        dims: dimension of an example. examples: per prompt.
        dim, heads, depth: of both AoT; the standard transformer has half the layers, as in the paper.
        eta: step size of MSSA.
        init_std: deviation of the initial weights; GPT-2's 0.02 is for wide models.
        position_scale: how many times larger the positions start.
        paired: if True, in every model a question and its answer start with the same position, plus one vector per
            kind. Otherwise the model has to learn which tokens belong together: attention whose query is its key
            cannot look one token back by itself.
        derived: if True, MSSA starts as the operator that the paper derives, ``models.aot.start_as_derived``.
        steps, batch_size, rate, warmup: of the training with Adam.
        tests: prompts to test on.
    """

    tasks: tuple[str, ...] = ("linear", "sparse")
    opposite: bool = False
    dims: int = 2
    nonzeros: int = 1
    examples: int = 7
    dim: int = 64
    heads: int = 8
    depth: int = 6
    eta: float = 2.0
    init_std: float = 0.125
    position_scale: float = 4.0
    paired: bool = True
    derived: bool = True
    steps: int = 2000
    batch_size: int = 64
    rate: float = 2e-3
    warmup: int = 100
    tests: int = 1280


PRESETS = {
    "default": ICLSettings(),
    # The paper's d, nonzeros, model, batch, iterations and prompts; examples and rate of Garg et al. 2022.
    "paper": ICLSettings(
        dims=20,
        nonzeros=3,
        examples=41,
        dim=128,
        heads=8,
        depth=32,
        eta=1.0,
        init_std=0.02,
        position_scale=1.0,
        paired=False,
        derived=False,
        steps=50_000,
        rate=1e-4,
        warmup=1000,
    ),
    "quick": ICLSettings(dims=2, examples=5, dim=16, heads=2, depth=2, steps=6, batch_size=8, warmup=2, tests=64),
    "opposite": ICLSettings(tasks=("linear",), opposite=True, steps=1250),
}
