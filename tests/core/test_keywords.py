"""A keyword that nothing has is refused as by Python, with the name that was meant."""

import inspect
import re

import pytest
import torch

import crate_kernels
from crate_kernels import SubspaceCache, TokenStatsCache, analysis, distributed, models, nn, testing
from crate_kernels._core import checks

CALLS = {
    "mssa": (crate_kernels.mssa, "is_causal", "causal"),
    "mssa-mask": (crate_kernels.mssa, "attention_mask", "key_padding_mask"),
    "mssa-dropout": (crate_kernels.mssa, "dropout", "dropout_p"),
    "mssa-scale": (crate_kernels.mssa, "softmax_scale", "scale"),
    "mssa-bias": (crate_kernels.mssa, "attn_mask", None),  # a mask per key is no bias of the scores
    "tssa": (crate_kernels.tssa, "is_causal", "causal"),
    "tssa-scale": (crate_kernels.tssa, "scale", None),  # not cache, whose letters are near
    "distributed-mssa": (distributed.mssa, "is_causal", "causal"),
    "distributed-tssa": (distributed.tssa, "attention_mask", "key_padding_mask"),
    "ista": (crate_kernels.ista, "eta", "step_size"),
    "ista-lambda": (crate_kernels.ista, "lmbda", "lambd"),
    "overcomplete": (crate_kernels.ista_overcomplete, "eta", "step_size"),
    "overcomplete-far": (crate_kernels.ista_overcomplete, "window", None),
    "MSSA": (nn.MSSA, "num_heads", "heads"),
    "MSSA-dim": (nn.MSSA, "head_dim", "dim_head"),
    "TSSA": (nn.TSSA, "heads", "num_heads"),
    "CausalMSSA": (nn.CausalMSSA, "num_heads", "n_head"),
    "CausalTSSA": (nn.CausalTSSA, "blocksize", "block_size"),
    "ISTA": (nn.ISTA, "lmbda", "lambd"),
    "OvercompleteISTA": (nn.OvercompleteISTA, "eta", "step_size"),
    "MCR2Loss": (nn.MCR2Loss, "eps_sq", "eps_squared"),
    "SubspaceCache": (SubspaceCache, "max_len", "max_seqlen"),
    "TokenStatsCache": (TokenStatsCache, "num_heads", "nheads"),
}


@pytest.mark.parametrize(("call", "name", "meant"), CALLS.values(), ids=CALLS)
def test_the_name_that_was_meant(call, name, meant):
    parameters = inspect.signature(call).parameters.values()
    required = [torch.ones(2) if inspect.isfunction(call) else 1 for each in parameters if each.default is each.empty]
    with pytest.raises(TypeError) as caught:
        call(*required, **{name: 1})
    owner = call.__name__ if inspect.isfunction(call) else f"{call.__name__}.__init__"
    said = f"{owner}() got an unexpected keyword argument {name!r}"
    assert str(caught.value) == (said + f"; did you mean {meant}?" if meant else said)


FUNCTIONS = {f"{call.__module__}.{call.__name__}": call for call, *_ in CALLS.values()}


@pytest.mark.parametrize("call", FUNCTIONS.values(), ids=FUNCTIONS)
def test_the_signature_names_all_that_may_be_passed(call):
    assert not [each for each in inspect.signature(call).parameters.values() if each.kind is each.VAR_KEYWORD]


def test_every_operator_and_module_is_here():
    public = [getattr(package, name) for package in (crate_kernels, nn, distributed) for name in package.__all__]
    ours = re.compile(r"crate_kernels\.(ops|nn|distributed\.api)\b")
    assert {each for each in public if ours.match(getattr(each, "__module__", ""))} == set(FUNCTIONS.values())


PACKAGES = crate_kernels, models, analysis, testing, distributed


def members(package):
    """Return the public functions of a package that are ours, by name."""
    found = {f"{package.__name__}.{name}": getattr(package, name) for name in package.__all__}
    return {name: each for name, each in found.items() if inspect.isfunction(each)}


PUBLIC = {name: each for package in PACKAGES for name, each in members(package).items()}
MODULES = {each.__name__: each for each in (getattr(nn, name) for name in nn.__all__)}
MODULES |= {family.Model.__name__: family.Model for family in models._FAMILIES}
OPEN = {"create", "from_pretrained"}  # take fields of a config, which have other tests
CALLABLES = {
    **{name: each for name, each in PUBLIC.items() if each not in FUNCTIONS.values() and each.__name__ not in OPEN},
    **{f"{name}.forward": each.forward for name, each in MODULES.items()},
    **{family.Config.__name__: family.Config for family in models._FAMILIES},
}


@pytest.mark.parametrize("call", CALLABLES.values(), ids=CALLABLES)
def test_every_public_callable_says_what_was_meant(call):
    parameters = inspect.signature(call).parameters
    required = [
        None for each in parameters.values() if each.default is each.empty and each.kind is not each.KEYWORD_ONLY
    ]
    for name in parameters:
        if name != "self" and f"{name}s" not in parameters:
            with pytest.raises(TypeError, match=rf"unexpected keyword argument '{name}s'; did you mean {name}\?$"):
                call(*required, **{f"{name}s": 1})


def test_a_module_that_says_what_was_meant_compiles_exports_and_is_traced():
    module, x, mask = nn.MSSA(8, heads=2, dim_head=4), torch.randn(2, 3, 8), torch.ones(2, 3, dtype=torch.bool)
    expected = module(x, key_padding_mask=mask)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, key_padding_mask=mask), expected)
    exported = torch.export.export(module, (x,), {"key_padding_mask": mask}).module()
    torch.testing.assert_close(exported(x, key_padding_mask=mask), expected)


def test_a_call_compiles_in_one_graph():
    compiled = torch.compile(crate_kernels.ista, fullgraph=True, backend="eager")
    x, weight = torch.randn(3, 4), torch.randn(4, 4)
    assert torch.equal(compiled(x, weight, lambd=0.2), crate_kernels.ista(x, weight, lambd=0.2))


NEAR = {"letters": ("lmbda", "lambd"), "synonym": ("eta", "step_size"), "far": ("qwerty", None)}


@pytest.mark.parametrize(("name", "meant"), NEAR.values(), ids=NEAR)
def test_a_suggestion(name, meant):
    assert checks.suggestion(name, ("step_size", "lambd")) == (f"; did you mean {meant}?" if meant else "")
