"""Modules and models where two sizes happen to be one: whatever confuses axes by their size shows here."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from crate_kernels import analysis
from crate_kernels.models.crate import RateGradientStep
from crate_kernels.models.crate_lm import TiedISTA
from crate_kernels.nn import ISTA, MSSA, TSSA, CausalMSSA, CausalTSSA, OvercompleteISTA
from crate_kernels.testing import measure
from tests.models.families import FAMILIES, drawn, output

F64 = torch.float64
SIZES = {  # batch, heads, seqlen, head_dim
    "seqlen-is-heads": (2, 5, 5, 3),
    "batch-is-heads": (3, 3, 7, 4),
    "seqlen-is-head_dim": (2, 3, 4, 4),
    "batch-is-seqlen": (5, 3, 5, 2),
    "heads-is-head_dim": (2, 4, 7, 4),
    "seqlen-is-dim": (2, 2, 6, 3),
    "tokens-are-dim": (2, 3, 6, 4),
    "all-one-number": (4, 4, 4, 4),
    "all-ones": (1, 1, 1, 1),
}
MODULES = {
    "mssa": lambda n, h, d, b: MSSA(h * d, h, d, backend=b),
    "mssa-causal": lambda n, h, d, b: MSSA(h * d, h, d, causal=True, backend=b),
    "mssa-tied": lambda n, h, d, b: MSSA(h * d, h, d, tied=True, backend=b),
    "mssa-narrow": lambda n, h, d, b: MSSA(d, h, d, backend=b),
    "causal-mssa": lambda n, h, d, b: CausalMSSA(h * d, h, backend=b),
    "tssa": lambda n, h, d, b: TSSA(h * d, h, True, backend=b),
    "causal-tssa": lambda n, h, d, b: CausalTSSA(h * d, h, n, backend=b),
    "ista": lambda n, h, d, b: ISTA(h * d, backend=b),
    "overcomplete-square": lambda n, h, d, b: OvercompleteISTA(h * d, h * d, backend=b),
    "overcomplete-hidden-is-seqlen": lambda n, h, d, b: OvercompleteISTA(h * d, n, backend=b),
    "tied-square": lambda n, h, d, b: TiedISTA(h * d, h * d, backend=b),
}


def results(module, x, **options):
    """Output and every gradient, by the names that the tolerance knows."""
    leaf = x.clone().requires_grad_()
    out = module(leaf, **options)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=F64).to(out.dtype)
    names = ["dx", *(f"d{name}" for name, _ in module.named_parameters())]
    return {"out": out.detach()} | dict(
        zip(names, torch.autograd.grad(out, [leaf, *module.parameters()], upstream), strict=True)
    )


CASES = {f"{name}-{size}": (name, size, False) for name in MODULES for size in SIZES}
CASES |= {
    f"{name}-{size}-padded": (name, size, True)
    for name in MODULES
    for size in ("batch-is-seqlen", "seqlen-is-heads", "all-one-number")
    if "ssa" in name
}


@pytest.mark.parametrize(("name", "size", "padded"), CASES.values(), ids=CASES)
def test_a_module_equals_itself_on_reference(name, size, padded):
    batch, heads, seqlen, head_dim = SIZES[size]
    generator, make = torch.Generator().manual_seed(0), MODULES[name]
    naive = make(seqlen, heads, head_dim, "reference")
    for parameter in naive.parameters():
        nn.init.normal_(parameter, std=0.25, generator=generator)
    x = torch.randn(batch, seqlen, head_dim if name == "mssa-narrow" else heads * head_dim, generator=generator)
    keep = torch.arange(seqlen) <= torch.arange(batch)[:, None] % seqlen
    options = {"key_padding_mask": keep} if padded else {}
    eager, exact = results(naive, x, **options), results(copy.deepcopy(naive).double(), x.double(), **options)
    default, composite = (make(seqlen, heads, head_dim, backend) for backend in (None, "composite"))
    for module in (default, composite):
        module.load_state_dict(naive.state_dict())
    for each in measure(results(default, x, **options), eager, exact, torch.float32):
        assert each.passed, each
    torch.testing.assert_close(results(composite.double(), x.double(), **options), exact, rtol=1e-10, atol=1e-12)


# Batch, tokens (or examples of two), heads and channels are all 4; other sizes are 16 or 4.
IMAGE = {"dim": 16, "depth": 2, "heads": 4, "image_size": (4, 12), "patch_size": 4, "num_classes": 16, "channels": 1}
TEXT = {"block_size": 4, "vocab_size": 16, "n_layer": 2, "n_head": 4, "n_embd": 16}
MODELS = {
    "crate": {**IMAGE, "dim_head": 4},
    "crate_alpha": {**IMAGE, "dim_head": 4, "overcomplete_ratio": 1},
    "crate_mae": {"embed_dim": 16, "num_heads": 4, "decoder_embed_dim": 16, "decoder_num_heads": 4, "in_chans": 1}
    | {"img_size": (4, 12), "patch_size": 4},
    "crate_mae_encoder": {"embed_dim": 16, "num_heads": 4, "img_size": (4, 12), "patch_size": 4, "in_chans": 1},
    "tost": {"embed_dim": 16, "num_heads": 4, "img_size": (16, 16), "num_classes": 16, "mlp_ratio": 1.0},
    "crate_lm": TEXT,
    "crate_lm_overcomplete": {**TEXT, "overcomplete_ratio": 1},
    "tost_lm": TEXT,
    "aot_vision": {**IMAGE, "image_size": 8, "patch_size": 4},
    "aot_lm": TEXT,
    "aot_regression": {"n_dims": 4, "dim": 16, "heads": 4, "n_positions": 4},
}
GIVEN = {
    "crate_mae": lambda g: (torch.randn(4, 1, 4, 12, generator=g), None, torch.eye(4, 3)),
    "tost": lambda g: (torch.randn(4, 3, 16, 16, generator=g),),
    "aot_vision": lambda g: (torch.randn(4, 1, 8, 8, generator=g),),
    "aot_regression": lambda g: (torch.randn(4, 2, 4, generator=g), torch.randn(4, 2, generator=g)),
    **dict.fromkeys(("crate", "crate_alpha", "crate_mae_encoder"), lambda g: (torch.randn(4, 1, 4, 12, generator=g),)),
    **dict.fromkeys(
        ("crate_lm", "crate_lm_overcomplete", "tost_lm", "aot_lm"),
        lambda g: (torch.randint(16, (4, 4), generator=g),),
    ),
}


@pytest.mark.parametrize("family", MODELS)
def test_a_model_equals_itself_on_reference(family):
    model_class, config = FAMILIES[family]
    config = replace(config, **MODELS[family], backend="composite")
    model = drawn(model_class(config).double()).eval()
    naive = model_class(replace(config, backend="reference")).double().eval()
    naive.load_state_dict(model.state_dict())
    inputs = [
        t.double() if t is not None and t.is_floating_point() else t
        for t in GIVEN[family](torch.Generator().manual_seed(1))
    ]
    outs = [output(family, each(*inputs)) for each in (model, naive)]
    torch.testing.assert_close(*outs, rtol=1e-10, atol=1e-11)
    for out in outs:
        out.square().sum().backward()
    for (name, p), q in zip(model.named_parameters(), naive.parameters(), strict=True):
        if p.grad is not None or q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-10, msg=name)


def test_the_exact_gradient_is_that_of_the_rate_where_tokens_are_as_many_as_channels():
    for seqlen, heads, head_dim in ((4, 3, 4), (4, 4, 4), (12, 3, 4)):
        torch.manual_seed(0)
        module, x = RateGradientStep(12, heads, head_dim, gamma=0.4).double(), torch.randn(2, seqlen, 12, dtype=F64)
        eps_squared = head_dim / (seqlen * 0.4)
        subspaces = analysis.projection_subspaces(module.qkv.weight, heads)
        x.requires_grad_()
        rate = analysis.subspace_coding_rate(x, subspaces, eps_squared=eps_squared).sum()
        torch.testing.assert_close(module(x), -torch.autograd.grad(rate, x)[0])


def test_signal_to_noise_where_tokens_are_as_many_as_subspaces():
    generator = torch.Generator().manual_seed(0)
    z, labels = torch.randn(3, 3, 6, generator=generator, dtype=F64), torch.tensor([2, 0, 0])
    bases = torch.linalg.qr(torch.randn(3, 6, 3, generator=generator, dtype=F64)).Q
    actual = analysis.snr(z, bases, labels)
    for b in range(3):
        for k in range(3):
            rows = z[b, labels == k]
            inside = rows @ bases[k] @ bases[k].mT
            torch.testing.assert_close(actual[b, k], inside.norm() / (rows - inside).norm(), equal_nan=True)
