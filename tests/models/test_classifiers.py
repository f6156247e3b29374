"""The image models as classifiers: features, head, no head."""

from typing import Any

import pytest
import torch

from crate_kernels import models
from tests.models.families import build, drawn, inputs

FAMILIES = {
    "crate": {},
    "crate-mean": {"pool": "mean"},
    "crate_alpha": {},
    "crate_mae_encoder": {},
    "tost": {},
    "tost-mean": {"pool": "mean"},
    "aot_vision": {},
}
CASES = [pytest.param(name.partition("-")[0], changes, id=name) for name, changes in FAMILIES.items()]
TOKENS = {"crate": 13, "crate_alpha": 13, "crate_mae_encoder": 13, "tost": 7, "aot_vision": 5}


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_the_head_reads_the_features(family, changes):
    model, (img,) = drawn(build(family, **changes)).eval(), inputs(family)
    features = model.forward_features(img)
    assert features.shape == (2, TOKENS[family], 24)
    assert torch.equal(model(img), model.forward_head(features))
    pooled = model.forward_head(features, pre_logits=True)
    assert pooled.shape == (2, 24)
    torch.testing.assert_close(model.get_classifier()(pooled), model(img))


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_without_classes_comes_what_the_head_would_read(family, changes, tmp_path):
    whole, (img,) = drawn(build(family, **changes)).eval(), inputs(family)
    model: Any = build(family, num_classes=0, **changes).eval()
    last = model.layout.classifier + "."
    assert {n for n in whole.state_dict() if n not in model.state_dict()} == {f"{last}weight", f"{last}bias"}
    model.load_state_dict({n: t for n, t in whole.state_dict().items() if n in model.state_dict()})
    wanted = whole.forward_head(whole.forward_features(img), pre_logits=True)
    assert torch.equal(model(img), wanted)
    assert torch.equal(model.forward_head(model.forward_features(img), pre_logits=True), wanted)
    model.save_pretrained(tmp_path)
    assert torch.equal(models.from_pretrained(tmp_path).eval()(img), wanted)


@pytest.mark.parametrize("family", TOKENS)
def test_training_gives_one_tensor_and_a_negative_number_of_classes_is_none(family):
    assert build(family).train()(*inputs(family)).shape == (2, 5)
    with pytest.raises(ValueError, match="num_classes must be >= 0, got -1"):
        build(family, num_classes=-1)


# As many patches as the model has positions, in another arrangement: they would get those of other places.
TURNED = {"crate": (12, 8), "crate_alpha": (12, 8), "aot_vision": (4, 16)}


@pytest.mark.parametrize("family", TURNED)
def test_positions_belong_to_one_size_of_image(family):
    with pytest.raises(ValueError, match=r"img must have 8x(8|12) pixels, got \(1, 3, "):
        build(family)(torch.ones(1, 3, *TURNED[family]))
