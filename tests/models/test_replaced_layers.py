"""Models whose linear layers are adapted, quantised or elsewhere between calls: weights are read through layers."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from crate_kernels.models.aot import start_as_derived
from crate_kernels.models.redunet import ReduNet
from crate_kernels.nn import MSSA
from tests.models import redunets
from tests.models.families import BASELINES, FAMILIES, build, drawn, inputs, output
from tests.nn.adapters import LowRank, quantised, replaced

MODELS = {
    **{family: (family, {}) for family in (*FAMILIES, *BASELINES)},
    "crate-tied": ("crate", {"attention": "tied", "gamma": 0.3}),
    "crate-gradient": ("crate", {"attention": "gradient", "gamma": 0.3}),
}
each_model = pytest.mark.parametrize(("family", "changes"), MODELS.values(), ids=MODELS)
LANGUAGE = {name: case for name, case in MODELS.items() if name.endswith(("_lm", "_overcomplete"))}
TOKENS = torch.tensor([[3, 1, 4], [1, 5, 9]])


def cpu_offload(model):
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate: the extra hf")
    return accelerate.cpu_offload(model, torch.device("cpu"))


def disk_offload(folder):
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate: the extra hf")
    return lambda model: accelerate.disk_offload(model, folder, execution_device=torch.device("cpu"))


def adapted(family, changes):
    """A model with adapters, and one that has them merged into its weights."""
    model = drawn(build(family, **changes)).eval()
    model = replaced(model, nn.Linear, LowRank)
    return model, replaced(copy.deepcopy(model), LowRank, LowRank.merged)


@each_model
def test_adapted_layers_give_the_merged_models_output(family, changes):
    model, merged = adapted(family, changes)
    assert_close(output(family, model(*inputs(family))), output(family, merged(*inputs(family))), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("place", ["cpu", "disk"])
@each_model
def test_offloaded_weights_give_the_models_output(family, changes, place, tmp_path):
    model = drawn(build(family, **changes)).eval()
    away = (cpu_offload if place == "cpu" else disk_offload(tmp_path))(copy.deepcopy(model))
    assert next(away.parameters()).is_meta
    with torch.no_grad():
        actual, expected = (output(family, each(*inputs(family))) for each in (away, model))
    assert_close(actual, expected)


@each_model
def test_quantised_layers_give_an_output_near_the_models(family, changes):
    model = drawn(build(family, **changes)).eval()
    near = quantised(copy.deepcopy(model))
    with torch.no_grad():
        actual, expected = (output(family, each(*inputs(family))) for each in (near, model))
    assert (actual - expected).norm() < 0.15 * expected.norm()


@pytest.mark.parametrize(("family", "changes"), LANGUAGE.values(), ids=LANGUAGE)
def test_replaced_layers_generate(family, changes):
    model, merged = adapted(family, changes)
    assert torch.equal(model.generate(TOKENS, 4, temperature=0), merged.generate(TOKENS, 4, temperature=0))
    model = drawn(build(family, **changes)).eval()
    expected = model.generate(TOKENS, 4, temperature=0)
    assert torch.equal(cpu_offload(copy.deepcopy(model)).generate(TOKENS, 4, temperature=0), expected)
    near = quantised(copy.deepcopy(model))
    step = near.generate(TOKENS, 1, temperature=0)
    assert torch.equal(step, near.generate(TOKENS, 1, temperature=0, use_cache=False))


@pytest.mark.parametrize("kind", ["vector", "signal", "image"])
def test_operators_that_wait_elsewhere_are_fetched_and_cannot_be_set(kind):
    samples, labels = redunets.samples(redunets.SHAPES[kind])
    network = ReduNet(redunets.double(redunets.layer_for(kind)))
    network.init(samples, labels)
    away = cpu_offload(copy.deepcopy(network))
    with torch.no_grad():
        assert_close(away(samples), network(samples))
    for change in (lambda: away.init(samples, labels), lambda: away.update(samples, labels), away.zero):
        with pytest.raises(ValueError, match=f"{type(network[0]).__name__}: weights must be in memory to be set"):
            change()


def test_a_code_needs_the_weight():
    """PyTorch multiplies by memory that is not there."""
    model = cpu_offload(build("crate_lm_overcomplete"))
    with pytest.raises(ValueError, match="TiedISTA: weight must be on x's device cpu, got meta"):
        model.transformer["h"][0].ista.encode(torch.randn(2, 5, 24))


REPLACED = {
    "adapted": lambda module: replaced(module, nn.Linear, LowRank),
    "quantised": quantised,
    "parametrised": lambda module: replaced(module, nn.Linear, nn.utils.parametrizations.weight_norm),
    "offloaded": cpu_offload,
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("replace", REPLACED.values(), ids=REPLACED)
def test_a_derived_start_needs_weights_that_it_can_draw(replace, tied):
    module = replace(nn.Sequential(MSSA(6, 2, 3, tied=tied)))
    before = [p.detach().clone() for p in module.parameters() if not p.is_meta]
    with pytest.raises(ValueError, match=r"start_as_derived: MSSA must hold the weights that it applies, got .* in 0:"):
        start_as_derived(module)
    assert all(map(torch.equal, before, [p.detach() for p in module.parameters()]))
