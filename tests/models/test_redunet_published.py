"""ReduNet as published: the golden files, weights and folders that load, names."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from crate_kernels import models
from crate_kernels.models import redunet
from crate_kernels.models.redunet import ReduNet1D, ReduNet1DConfig
from tests.models.redunets import double

GOLDEN = Path(__file__).resolve().parents[3] / "shared" / "golden"


def golden(system):
    with safe_open(GOLDEN / f"{system}.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # a file, not a mapping
        config = json.loads(file.metadata()["config"])
    state = {key.removeprefix("state/"): value for key, value in tensors.items() if key.startswith("state/")}
    return tensors, state, config


def close(actual, published, oracle):
    """Within twice the published code's own distance from double precision, as everywhere."""
    published, oracle = published.double(), oracle.double()
    eps = torch.finfo(torch.float32).eps * oracle.abs().max()
    off = (published - oracle).abs().max()
    # Inverses lose digits by their condition number, about 1e3 here.
    assert off <= 1e3 * eps, "the oracle is not the published function"
    assert (actual.detach().double() - oracle).abs().max() <= 2 * (off + eps)


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="needs the golden files at ../shared/golden")
@pytest.mark.parametrize("system", ["redunet_vector", "redunet_2d"])
def test_published_networks(system):
    tensors, state, config = golden(system)
    net: Any = models.from_official(system, state, config)
    built: Any = type(net)(net.config)
    oracle: Any = double(type(net)(net.config))
    exact = oracle.init(tensors["input"].double(), tensors["labels"])
    output = built.init(tensors["input"], tensors["labels"])
    close(output, tensors["output"], exact)
    close(net(tensors["input"]), tensors["output"], exact)
    exact = oracle(tensors["test_input"].double()).detach()
    close(net(tensors["test_input"]), tensors["test_output"], exact)
    close(built(tensors["test_input"]), tensors["test_output"], exact)
    assert set(state) == set(built.state_dict())
    for name, value in built.state_dict().items():
        published, reference = net.state_dict()[name], oracle.state_dict()[name]
        if value.is_complex():
            value, published, reference = (torch.view_as_real(t) for t in (value, published, reference))
        close(value, published, reference)


def test_complex_weights_load_as_such_or_as_pairs():
    config = {"num_classes": 2, "num_layers": 2, "channels": 2, "timesteps": 2}
    net: Any = ReduNet1D(ReduNet1DConfig(**config))
    state = net.state_dict()
    pairs = {name: torch.view_as_real(v) if v.is_complex() else v for name, v in state.items()}
    for published in (state, pairs):
        loaded = models.from_official("redunet_1d", published, config).state_dict()
        assert all(torch.equal(loaded[name], state[name]) for name in state)


@pytest.mark.parametrize("name", ["redunet_vector", "redunet_1d", "redunet_2d"])
def test_a_folder_keeps_a_network(name, tmp_path):
    sizes = {"redunet_vector": {"d": 3}, "redunet_1d": {"channels": 2, "timesteps": 3}}
    config = {"num_classes": 2, "num_layers": 2, **sizes.get(name, {"channels": 2, "height": 2, "width": 3})}
    family = {"redunet_vector": redunet.vector, "redunet_1d": redunet.fourier1d, "redunet_2d": redunet.fourier2d}[name]
    net = family.Model(family.Config(**config))
    again: Any = models.from_pretrained(net.save_pretrained(tmp_path / "net"))
    assert again.config == net.config
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in net.state_dict().items())


def test_the_books_networks_have_names():
    net: Any = models.create("redunet_gaussians", num_layers=2)
    assert [len(net), net.config.d, net.config.num_classes] == [2, 3, 3]
    net = models.create("redunet_polar", num_layers=1)
    assert net[0].E.weight.shape == (15, 15, 200)
    assert net[0].E.weight.is_complex()
