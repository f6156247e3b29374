"""What torchvision's feature extractor, counters of multiplications and adapters make of our models."""

import warnings
from copy import deepcopy

import pytest
import torch
from torch import nn

from crate_kernels._core import operator
from tests.integrations import vision_schemas  # noqa: F401
from tests.models.families import FAMILIES, output
from tests.models.test_tools import CRATES, VISION, images_of, macs, model_of


@pytest.mark.parametrize("family", VISION)
def test_torchvision_extracts_features(family):
    pytest.importorskip("torchvision", reason="needs torchvision")
    from torchvision.models.feature_extraction import create_feature_extractor

    model, images, seen = model_of(family), images_of(family), {}
    blocks = model.layout.blocks
    for index in range(2):
        model.get_submodule(f"{blocks}.{index}").register_forward_hook(
            lambda module, args, out, index=index: seen.update({f"{index}": out})
        )
    model(*images)
    expected = dict(seen)
    nodes = {f"{blocks}.{index}": f"{index}" for index in range(2)}
    found = create_feature_extractor(model, nodes)(*images)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("family", ["crate", "tost"])
def test_counters_see_the_linear_layers(family):
    thop, ptflops = (pytest.importorskip(name, reason=f"needs {name}") for name in ("thop", "ptflops"))
    images, wanted = tuple(i[:1] for i in images_of(family)), macs(model_of(family), (images_of(family)[0][:1],))
    handlers = {kind: (lambda m, x, y: None) for kind in (nn.LayerNorm, nn.Conv2d, nn.SyncBatchNorm, nn.GELU)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        counted, _ = thop.profile(model_of(family), inputs=images, custom_ops=handlers, verbose=False)
        other, _ = ptflops.get_model_complexity_info(
            model_of(family), tuple(images[0].shape[1:]), as_strings=False, print_per_layer_stat=False
        )
    assert counted == wanted
    assert other > wanted  # norms and PyTorch's own operators too


@pytest.mark.parametrize("family", ["crate", *CRATES])
def test_lora_adapts_every_layer(family):
    peft = pytest.importorskip("peft", reason="needs peft")
    torch.manual_seed(0)
    model, (images,) = model_of(family), images_of(family)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=names, init_lora_weights=False))
    found = adapted(images)
    parameters = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(found.sin().sum(), list(parameters.values()))
    assert all(g.abs().max() > 0 for g in grads)
    assert len(parameters) == 2 * len(names)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(images), found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", [*FAMILIES, *CRATES])
@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
def test_torchao_quantises_every_linear_layer(family, kind):
    quantization = pytest.importorskip("torchao.quantization", reason="needs torchao")
    torch.manual_seed(0)
    model, tokens = deepcopy(model_of(family)), images_of(family)
    with torch.no_grad():
        expected = output(family, model(*tokens))
        quantization.quantize_(model, getattr(quantization, kind)())
        found = output(family, model(*tokens))
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert all(operator.is_wrapper(module.weight) for module in linear)
    assert 0 < (found - expected).norm() / expected.norm() < 0.1  # 8 bits in a few layers
