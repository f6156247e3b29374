"""Every model equals its published equations, restated, in float64: output and the gradient of every parameter."""

import pytest
import torch
from torch.testing import assert_close

from tests.models import restated
from tests.models.families import build, drawn, inputs, output

CASES = {
    "crate": ("crate", restated.crate, {}),
    "crate-mean": ("crate", restated.crate, {"pool": "mean", "ista": 0.3, "lambd": 0.2}),
    "aot-vision": ("aot_vision", restated.aot_vision, {}),
    "aot-vision-norm": ("aot_vision", restated.aot_vision, {"norm": True, "eta": 0.5}),
    "alpha": ("crate_alpha", restated.crate_alpha, {}),
    "alpha-three-steps": ("crate_alpha", restated.crate_alpha, {"steps": 3, "eta": 0.2, "lmbda": 0.3}),
    "alpha-narrow": ("crate_alpha", restated.crate_alpha, {"overcomplete_ratio": 1, "head_eps": 0.1}),
    "mae": ("crate_mae", restated.crate_mae, {}),
    "mae-identity": ("crate_mae", restated.crate_mae, {"use_softmax": False, "lambd": 5.0}),
    "mae-eps": ("crate_mae", restated.crate_mae, {"norm_eps": 0.1, "ista": 0.3}),
    "tost": ("tost", restated.tost, {"tokens_norm": True}),
    "tost-class-token-normed": ("tost", restated.tost, {"tokens_norm": False}),
    "tost-plain": ("tost", restated.tost, {"qkv_bias": False, "use_pos": False, "mlp_ratio": 1.5, "qk_scale": 0.5}),
    "tost-no-class-blocks": ("tost", restated.tost, {"cls_attn_layers": 0}),
    "tost-patch-16": ("tost", restated.tost, {"patch_size": 16, "img_size": 32}),
    "lm": ("crate_lm", restated.crate_lm, {"ista": 0.2, "lambd": 0.3}),
    "lm-overcomplete": ("crate_lm_overcomplete", restated.crate_lm, {}),
    "lm-three-steps": ("crate_lm_overcomplete", restated.crate_lm, {"steps": 3, "overcomplete_ratio": 2, "ista": 0.2}),
    "tost-lm": ("tost_lm", restated.tost_lm, {}),
    "tost-lm-bias": ("tost_lm", restated.tost_lm, {"bias": True}),
}


@pytest.mark.parametrize(("family", "function", "changes"), CASES.values(), ids=CASES)
def test_equals_the_published_equations(family, function, changes):
    model = drawn(build(family, **changes).double()).eval()
    tensors = inputs(family, dtype=torch.float64)
    tensors = (torch.randn(2, 3, 32, 32, dtype=torch.float64),) if changes.get("patch_size") == 16 else tensors
    state = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    actual = output(family, model(*tensors))
    expected = function(state, model.config, *(value for value in tensors if value is not None))
    # The Fourier positions are computed in float32 as published, whatever the model's dtype.
    close = {"rtol": 1e-6, "atol": 1e-6} if changes.get("use_pos", family == "tost") else {"rtol": 1e-10, "atol": 1e-10}
    assert_close(actual, expected, **close)
    upstream = torch.randn(actual.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    options = {"grad_outputs": upstream, "allow_unused": True}
    ours = torch.autograd.grad(actual, list(parameters.values()), **options)
    theirs = torch.autograd.grad(expected, list(parameters.values()), **options)
    for name, a, e in zip(parameters, ours, theirs, strict=True):
        assert (a is None) == (e is None), name
        if a is not None:
            assert_close(a, e, msg=lambda text, name=name: f"{name}: {text}", **close)
    # DistributedDataParallel waits for a gradient of every parameter that requires one.
    assert [name for name, gradient in zip(parameters, ours, strict=True) if gradient is None] == []
