"""examples/timm_backbone.py runs, in small."""

import runpy
from pathlib import Path

import pytest
import torch

pytest.importorskip("timm", reason="needs timm: the extra timm")
pytest.importorskip("torchvision", reason="needs torchvision: the extra timm")

ROOT = Path(__file__).parents[2]


def test_the_example_learns_in_small(capsys):
    pytest.importorskip("sklearn", reason="needs scikit-learn: the extra demo")
    with torch.random.fork_rng():
        train = runpy.run_path(str(ROOT / "examples" / "timm_backbone.py"))["train"]
        found = train(60, batch=16, side=2, embed_dim=32, depth=2)
    assert found > 0.6  # by chance 0.25
    assert capsys.readouterr().out.startswith("step 0: loss ")
