"""Outputs and all gradients of the published code, from golden files beside the checkout."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from crate_kernels import models
from crate_kernels._core import backends

GOLDEN = Path(__file__).resolve().parents[3] / "shared" / "golden"
pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason="needs the golden files at ../shared/golden")

# The operators of each system: a backend is tried where it has them all.
SYSTEMS = {
    "crate": ("mssa", "ista"),
    "crate_alpha": ("mssa", "ista"),
    "crate_mae": ("mssa", "ista"),
    "crate_lm": ("mssa", "ista"),
    "crate_lm_overcomplete": ("mssa", "ista"),
    "tost_vision": ("tssa",),
    "tost_lm": ("tssa",),
    "tssa_attention": ("tssa",),
    "tssa_causal_attention": ("tssa",),
}


def available(ops):
    """Backends that run all ``ops`` in float32 here, and the device they run them on."""
    for name in backends.names():
        for device in ("cpu", "cuda"):
            try:
                for op in ops:
                    backends.resolve(op, name, torch.device(device), torch.float32)
            except RuntimeError:
                continue
            if device == "cpu" or torch.cuda.is_available():
                yield name, device


CASES = {
    f"{system}-{backend}-{device}": (system, backend, device)
    for system, ops in SYSTEMS.items()
    for backend, device in available(ops)
}


def load(system):
    with safe_open(GOLDEN / f"{system}.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # a file, not a mapping
        return tensors, json.loads(file.metadata()["config"])


def results(module, system, tensors):
    """Return what the published forward returns, by the names of the golden file."""
    dtype = next(module.parameters()).dtype
    x = tensors["input"].to(next(module.parameters()).device, copy=True)
    x = x.to(dtype).requires_grad_() if x.is_floating_point() else x
    if system == "crate_mae":
        loss, out, mask = module(x, mask=tensors["mask"].to(x))
        return x, out, {"loss": loss.reshape(1), "mask": mask}
    out = module(x)
    return x, out[0] if isinstance(out, tuple) else out, {}


def run(system, tensors, config, backend, device, dtype):
    """Return what the golden file holds, recomputed."""
    state = {key.removeprefix("state/"): value for key, value in tensors.items() if key.startswith("state/")}
    module = models.from_official(system, state, {**config, "backend": backend}).to(device, dtype).eval()
    x, out, others = results(module, system, tensors)
    out.backward(tensors["grad_output"].to(device, dtype))
    grads = {f"grad/{name}": p.grad for name, p in module.named_parameters() if p.grad is not None}
    grads |= {"grad_input": x.grad} if x.requires_grad else {}
    return {"output": out.detach(), **others, **grads}


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_published_class_would_load_it_back(system):
    tensors, config = load(system)
    state = {key.removeprefix("state/"): value for key, value in tensors.items() if key.startswith("state/")}
    exported = models.to_official(models.from_official(system, state, config))
    assert exported.keys() == state.keys()
    assert all(torch.equal(exported[name], value) for name, value in state.items())


@pytest.mark.parametrize(("system", "backend", "device"), CASES.values(), ids=CASES)
def test_same_output_and_gradients(system, backend, device):
    tensors, config = load(system)
    wanted = {key for key in tensors if not key.startswith("state/")} - {"input", "grad_output"}
    exact = run(system, tensors, config, "reference", "cpu", torch.float64)
    ours = run(system, tensors, config, backend, device, torch.float32)
    # The published code's rounding is that of the machine that wrote the file; reference's is that of this one.
    eager = run(system, tensors, config, "reference", "cpu", torch.float32)
    assert ours.keys() == wanted
    for key in wanted:
        golden, oracle, actual = tensors[key].double(), exact[key], ours[key].double().cpu()
        eps = torch.finfo(torch.float32).eps * oracle.abs().max()
        published = (golden - oracle).abs().max()
        assert published <= 32 * eps, f"{key}: the oracle is not the published function"
        rounding = torch.maximum(published, (eager[key].double() - oracle).abs().max())
        tolerance = (3 if key.startswith("grad") else 2) * (rounding + eps)
        assert actual.isfinite().all()
        assert (actual - oracle).abs().max() <= tolerance, key
