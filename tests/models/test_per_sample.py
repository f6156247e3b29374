"""Per-sample gradients of whole models: by vmap over grad, and by opacus."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from crate_kernels.models.crate import RateGradientStep
from crate_kernels.nn import ISTA, MSSA, TSSA, CausalMSSA, CausalTSSA, OvercompleteISTA
from tests.models.families import FAMILIES, build, drawn, inputs, output

HOOKED = [f for f in FAMILIES if f not in ("tost", "crate_mae", "crate_mae_encoder")]  # docs/opacus.md has these
NO_BIAS = ("aot_regression", "tost_lm")
# CRATE-MAE's gradients reach 150.
WIDE = {"crate_mae": torch.float64}


def setting(family, batch=3, **changes):
    """Return a model, what it is fed, and the gradient of a loss that is a sum over samples for each of them."""
    dtype = WIDE.get(family, torch.float32)
    model = drawn(build(family, **changes)).to(dtype)
    tensors = inputs(family, batch, dtype)
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    names = ("imgs", "mask") if family == "crate_mae" else ("xs", "ys") if family == "aot_regression" else (None,)

    def loss(parameters, *samples):
        each = tuple(sample[None] for sample in samples)
        arguments = (each, {}) if names == (None,) else ((), dict(zip(names, each, strict=True)))
        return output(family, functional_call(model, parameters, *arguments)).sin().sum()

    return model, parameters, loss, tuple(g for g in tensors if g is not None)


def one_by_one(loss, parameters, inputs):
    each = [grad(loss)(parameters, *(g[i] for g in inputs)) for i in range(len(inputs[0]))]
    return {name: torch.stack([one[name] for one in each]) for name in parameters}


# ToST's class attention is PyTorch's own, which is a loop under vmap.
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_vmap_of_a_gradient_is_each_samples_gradient(family):
    model, parameters, loss, inputs = setting(family)
    model.eval()
    found = vmap(grad(loss), (None, *(0 for _ in inputs)))(parameters, *inputs)
    torch.testing.assert_close(found, one_by_one(loss, parameters, inputs), rtol=1e-4, atol=1e-5)


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
    model, parameters, loss, inputs = setting(family, backend=backend)
    expected = one_by_one(loss, parameters, inputs)
    wrapped = opacus.GradSampleModule(model.train(), loss_reduction="sum")
    output(family, wrapped(*inputs)).sin().sum().backward()
    found = {name: p.grad_sample for name, p in model.named_parameters()}
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.endswith(("_lm", "complete", "regression"))])
def test_what_hooks_see_of_a_language_model_has_the_batch_first(family):
    """So does opacus find the samples."""
    model, _, _, tensors = setting(family)
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
        output(family, model(*tensors)).sum().backward()
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


MODULES = {
    "mssa": lambda: MSSA(12, 3, 4),
    "causal_mssa": lambda: CausalMSSA(12, 3),
    "tssa": lambda: TSSA(12, 3),
    "causal_tssa": lambda: CausalTSSA(12, 3, 6),
    "ista": lambda: ISTA(12, learned=("lambd", "bias"), per_channel=True),
    "overcomplete": lambda: OvercompleteISTA(12, tied=True),
}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
@pytest.mark.parametrize("name", MODULES)
def test_opacus_takes_the_gradient_of_each_sample_of_a_module(name, opacus):
    module, x = MODULES[name](), torch.randn(3, 6, 12)
    expected = []
    for one in x.split(1):
        module.zero_grad()
        module(one).sin().sum().backward()
        expected.append({name: p.grad.clone() for name, p in module.named_parameters()})
    opacus.GradSampleModule(nn.Sequential(module), loss_reduction="sum")(x).sin().sum().backward()
    for name, p in module.named_parameters():
        torch.testing.assert_close(p.grad_sample, torch.stack([each[name] for each in expected]))


TWICE = {
    "tied": ("MSSA", lambda: MSSA(12, 3, 4, tied=True)),
    "gradient": ("RateGradientStep", lambda: RateGradientStep(12, 3, 4)),
}


@pytest.mark.parametrize("case", TWICE)
def test_a_projection_that_is_applied_twice_is_refused_under_opacus(case):
    """Its hooks see one of two uses, and its gradients would be wrong in silence."""
    owner, make = TWICE[case]
    module = make()
    module.qkv.register_full_backward_hook(lambda *_: None)
    assert module(X).shape == X.shape  # a hook of somebody else
    module.qkv.weight.grad_sample = None  # opacus marks the parameters so
    with pytest.raises(NotImplementedError, match=f"{owner}: opacus must not hook the projection"):
        module(X)
    assert module.eval()(X).shape == X.shape


@pytest.mark.parametrize("case", TWICE)
def test_opacus_hooks_such_a_projection(case, opacus):
    owner, make = TWICE[case]
    with pytest.raises(NotImplementedError, match=f"{owner}: opacus must not hook the projection"):
        opacus.GradSampleModule(nn.Sequential(make()))(X)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
@pytest.mark.parametrize("attention", ["tied", "gradient"])
def test_opacus_runs_a_whole_model_with_such_projections_again(attention, opacus):
    model, parameters, loss, inputs = setting("crate", attention=attention)
    expected = one_by_one(loss, parameters, inputs)
    opacus.GradSampleModule(model.train(), loss_reduction="sum")(*inputs).sin().sum().backward()
    found = {name: p.grad_sample for name, p in model.named_parameters()}
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
