"""Per-sample gradients of whole models: by vmap over grad, and by opacus."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from crate_kernels.nn import TSSA, CausalTSSA
from tests.models.families import FAMILIES, build, drawn, inputs, output

HOOKED = [f for f in FAMILIES if f not in ("tost", "crate_mae", "crate_mae_encoder")]  # docs/opacus.md has these
NO_BIAS = ("aot_regression", "tost_lm")
# CRATE-MAE's gradients reach 150.
WIDE = {"crate_mae": torch.float64}


def setting(family, batch=3, **changes):
    """Return a model, what it is fed, and the gradient of a loss that is a sum over samples for each of them."""
    dtype = WIDE.get(family, torch.float32)
    model = drawn(build(family, **changes)).to(dtype)
    given = inputs(family, batch, dtype)
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    names = ("imgs", "mask") if family == "crate_mae" else ("xs", "ys") if family == "aot_regression" else (None,)

    def loss(parameters, *samples):
        each = tuple(sample[None] for sample in samples)
        arguments = (each, {}) if names == (None,) else ((), dict(zip(names, each, strict=True)))
        return output(family, functional_call(model, parameters, *arguments)).sin().sum()

    return model, parameters, loss, tuple(g for g in given if g is not None)


def one_by_one(loss, parameters, given):
    each = [grad(loss)(parameters, *(g[i] for g in given)) for i in range(len(given[0]))]
    return {name: torch.stack([one[name] for one in each]) for name in parameters}


# ToST's class attention is PyTorch's own, which is a loop under vmap.
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_vmap_of_a_gradient_is_each_samples_gradient(family):
    model, parameters, loss, given = setting(family)
    model.eval()
    found = vmap(grad(loss), (None, *(0 for _ in given)))(parameters, *given)
    torch.testing.assert_close(found, one_by_one(loss, parameters, given), rtol=1e-4, atol=1e-5)


@pytest.fixture
def opacus(monkeypatch):
    """Opacus, with nothing changed in it afterwards."""
    package = pytest.importorskip("opacus", reason="needs opacus")
    rules = package.GradSampleModule.GRAD_SAMPLERS
    monkeypatch.setattr(package.GradSampleModule, "GRAD_SAMPLERS", dict(rules))
    return package


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")  # opacus's, of what has no gradient
@pytest.mark.parametrize("family", HOOKED)
@pytest.mark.parametrize("backend", ["reference", None])
def test_opacus_takes_the_gradient_of_each_sample(family, backend, opacus):
    if family in NO_BIAS:
        del opacus.GradSampleModule.GRAD_SAMPLERS[nn.LayerNorm]  # it reads a bias; the page says so
    model, parameters, loss, given = setting(family, backend=backend)
    expected = one_by_one(loss, parameters, given)
    wrapped = opacus.GradSampleModule(model.train(), loss_reduction="sum")
    output(family, wrapped(*given)).sin().sum().backward()
    found = {name: p.grad_sample for name, p in model.named_parameters()}
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.endswith(("_lm", "complete", "regression"))])
def test_what_hooks_see_of_a_language_model_has_the_batch_first(family):
    """So does opacus find the samples."""
    model, _, _, given = setting(family)
    seen, sizes = {}, set()

    def before(module, inputs):
        assert all(isinstance(each, torch.Tensor) for each in inputs)
        seen[module] = inputs[0].shape[0]

    def after(module, _, gradients):
        sizes.add((seen[module], gradients[0].shape[0]))

    for module in model.modules():
        if list(module.parameters(recurse=False)):
            module.register_forward_pre_hook(before)
            module.register_full_backward_hook(after)
    with pytest.warns(UserWarning, match="Full backward hook is firing"):  # of indices, which have no gradient
        output(family, model(*given)).sum().backward()
    assert sizes == {(3, 3)}


def test_without_hooks_positions_are_not_repeated():
    model = build("crate_lm")
    shapes = []
    model.transformer["wpe"].register_forward_hook(lambda _, __, out: shapes.append(tuple(out.shape)))
    model(*inputs("crate_lm"))
    assert shapes == [(7, 24)]


def replayed(module):
    """Mark a module as opacus does one that it will run again."""
    module.ft_compute_sample_grad = lambda *_: None
    return module


X, KEEP, OFFSETS = torch.randn(1, 6, 12), torch.ones(1, 6, dtype=torch.bool), torch.tensor([0, 2, 6], dtype=torch.int32)
LOST = {
    "tssa": (TSSA(12, 3), {"key_padding_mask": KEEP}),
    "causal_tssa": (CausalTSSA(12, 3, 6), {"key_padding_mask": KEEP}),
    "causal_tssa_packed": (CausalTSSA(12, 3, 6), {"cu_seqlens": OFFSETS, "max_seqlen": 4}),
    "tost_lm_packed": (build("tost_lm", n_embd=12).transformer["h"][0], {"cu_seqlens": OFFSETS, "max_seqlen": 4}),
}


@pytest.mark.parametrize("case", LOST)
def test_what_opacus_would_lose_is_refused(case):
    module, lost = LOST[case]
    assert module(X, **lost).shape == X.shape
    replayed(module)
    assert module(X).shape == X.shape
    with pytest.raises(NotImplementedError, match=f"{next(iter(lost))} must be None under opacus, got a Tensor"):
        module(X, **lost)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
def test_opacus_marks_what_it_runs_again(opacus):
    module = opacus.GradSampleModule(nn.Sequential(TSSA(12, 3)), loss_reduction="sum")._module[0]
    with pytest.raises(NotImplementedError, match="key_padding_mask must be None under opacus"):
        module(X, key_padding_mask=KEEP)
