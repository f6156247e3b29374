"""Outputs and all gradients of the published code, from golden files beside the checkout."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from crate_kernels import _backend, models
from crate_kernels.nn import TSSA, CausalTSSA

GOLDEN = Path(__file__).resolve().parents[3] / "shared" / "golden"
pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason="the golden files are not at ../shared/golden")


def crate(state, config, backend):
    return models.from_official("crate", state, {**config, "backend": backend})


def tssa_attention(state, config, backend):
    module = TSSA(**config, backend=backend)
    module.load_state_dict(state)
    return module


def tssa_causal_attention(state, config, backend):
    names = ("n_embd", "n_head", "block_size", "bias", "dropout")
    module = CausalTSSA(**{name: config[name] for name in names}, backend=backend)
    module.load_state_dict(state)
    return module


SYSTEMS = {
    "crate": (crate, "mssa"),
    "tssa_attention": (tssa_attention, "tssa"),
    "tssa_causal_attention": (tssa_causal_attention, "tssa"),
}


def available(op):
    """Backends that run ``op`` in float32 here, and the device they run it on."""
    for name in _backend.names():
        for device in ("cpu", "cuda"):
            try:
                _backend.resolve(op, name, torch.device(device), torch.float32)
            except RuntimeError:
                continue
            if device == "cpu" or torch.cuda.is_available():
                yield name, device


CASES = {
    f"{system}-{backend}-{device}": (system, backend, device)
    for system, (_, op) in SYSTEMS.items()
    for backend, device in available(op)
}


def load(system):
    with safe_open(GOLDEN / f"{system}.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # a file, not a mapping
        return tensors, json.loads(file.metadata()["config"])


def run(system, tensors, config, backend, device, dtype):
    """Return what the golden file holds, recomputed."""
    state = {key.removeprefix("state/"): value for key, value in tensors.items() if key.startswith("state/")}
    module = SYSTEMS[system][0](state, config, backend).to(device, dtype).eval()
    x = tensors["input"].to(device, dtype, copy=True).requires_grad_()
    out = module(x)
    out.backward(tensors["grad_output"].to(device, dtype))
    grads = {f"grad/{name}": parameter.grad for name, parameter in module.named_parameters()}
    return {"output": out.detach(), "grad_input": x.grad, **grads}


@pytest.mark.parametrize(("system", "backend", "device"), CASES.values(), ids=CASES)
def test_same_output_and_gradients(system, backend, device):
    tensors, config = load(system)
    wanted = {key for key in tensors if key.startswith("grad/")} | {"output", "grad_input"}
    exact = run(system, tensors, config, "reference", "cpu", torch.float64)
    ours = run(system, tensors, config, backend, device, torch.float32)
    assert ours.keys() == wanted
    for key in wanted:
        golden, oracle, actual = tensors[key].double(), exact[key], ours[key].double().cpu()
        eps = torch.finfo(torch.float32).eps * oracle.abs().max()
        published = (golden - oracle).abs().max()
        assert published <= 32 * eps, f"{key}: the oracle is not the published function"
        budget = (2 if key == "output" else 3) * (published + eps)
        assert actual.isfinite().all()
        assert (actual - oracle).abs().max() <= budget, key
