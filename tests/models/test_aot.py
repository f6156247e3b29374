"""AoT: sizes, the equations, gradients, errors. What holds for every family is in test_every_model."""

from typing import Any

import pytest
import torch
from torch import nn

from crate_kernels import models
from crate_kernels.models.aot import MHSA, KeyValueCache, Layer, start_as_derived
from crate_kernels.nn import MSSA
from tests.models import families

KINDS = {"lm": {"bias": False}, "vision": {}, "regression": {}}  # as published
VARIANTS = {
    "mssa": {},
    "mhsa": {"attention": "mhsa"},
    "eta": {"eta": 0.5},
    "transformer": {"attention": "mhsa", "mlp": True},
}


def build(kind, **changes) -> Any:
    return families.build(f"aot_{kind}", **KINDS[kind], **changes)


def run(model, inputs):
    out = model(*inputs)
    return out[0] if isinstance(out, tuple) else out


def inputs(kind):
    return families.inputs(f"aot_{kind}")


CASES = [
    pytest.param(kind, changes, id=f"{kind}-{name}")
    for kind in KINDS
    for name, changes in VARIANTS.items()
    if kind != "vision" or "mlp" not in changes
]


# Without positions for language, of the layers' matrices for regression; in millions as the paper rounds.
COUNTS = {
    "aot_lm_mssa_base": (101_868_544, "102"),
    "aot_lm_mssa_medium": (182_401_280, "182"),
    "aot_lm_mhsa_base": (122_165_120, "122"),
    "gpt2_base": (123_587_328, "124"),
    "aot_vision_mssa": (22_371_496, "22"),
    "aot_vision_mhsa": (14_915_176, "15"),
    "aot_icl_mssa": (1_048_576, None),
    "aot_icl_mhsa": (2_097_152, None),
    "transformer_icl": (3_145_728, None),
}


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_count(name):
    with torch.device("meta"):
        model: Any = models.create(name)
    if "icl" in name:
        count = sum(p.numel() for p in model.layers.parameters() if p.dim() == 2)
    else:
        count = sum(p.numel() for p in model.parameters())
        count = model.num_parameters() if "vision" not in name else count
    wanted, published = COUNTS[name]
    assert count == wanted
    assert published in (None, f"{count / 1e6:.0f}")


@pytest.mark.parametrize(("name", "total"), [("aot_icl_mssa", "7.50"), ("aot_icl_mhsa", "8.55")])
def test_parameter_count_in_context_with_the_papers_table_of_words(name, total):
    with torch.device("meta"):
        model: Any = models.create(name)
    assert f"{(sum(p.numel() for p in model.parameters()) + 50257 * 128) / 1e6:.2f}" == total


def attention(layer, x, causal):
    """The equations, head by head."""
    heads, out = layer.attn.heads, []
    projections = [layer.attn.qkv.weight] if layer.attn.qkv.weight.shape[0] == x.shape[-1] else None
    projections = projections or list(layer.attn.qkv.weight.chunk(3))
    size = x.shape[-1] // heads
    for h in range(heads):
        parts = [x @ p[h * size : (h + 1) * size].mT for p in projections]
        query, key, value = parts * 3 if len(parts) == 1 else parts
        scores = query @ key.mT * size**-0.5
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
        out.append(scores.softmax(-1) @ value)
    return torch.cat(out, -1) @ layer.attn.to_out[0].weight.mT


@pytest.mark.parametrize("mlp", [False, True], ids=["attention-only", "mlp"])
@pytest.mark.parametrize("norm", [False, True], ids=["bare", "norm"])
@pytest.mark.parametrize("kind", ["mssa", "mhsa"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_layer_is_a_step_and_nothing_else(kind, norm, mlp, causal):
    torch.manual_seed(0)
    layer = Layer(24, 3, kind, eta=0.7, norm=norm, mlp=mlp, causal=causal).double()
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    wanted = x + 0.7 * attention(layer, nn.functional.layer_norm(x, (24,)) if norm else x, causal)
    if mlp:
        wide = nn.functional.layer_norm(wanted, (24,)) @ layer.mlp[0].weight.mT
        wanted = wanted + nn.functional.gelu(wide) @ layer.mlp[2].weight.mT
    torch.testing.assert_close(layer(x), wanted)


def test_a_derived_start_is_the_papers_operator():
    """``Z + eta sum_k U_k U_k^T Z softmax(Z^T U_k U_k^T Z)``, the U_k orthonormal; nothing else is drawn anew."""
    model = build("regression", eta=0.7)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    start_as_derived(model)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {f"layers.{i}.attn.{name}" for i in range(2) for name in ("qkv.weight", "to_out.0.weight")}
    layer = model.layers[1].double()
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    seen, wanted = nn.functional.layer_norm(x, (24,)), x.clone()
    bases = (8**-0.25 * layer.attn.qkv.weight.detach()).mT.unflatten(1, (3, 8)).unbind(1)  # (24, 8) each
    future = torch.ones(5, 5).triu(1).bool()
    for basis in bases:
        torch.testing.assert_close(basis.mT @ basis, torch.eye(8).double(), atol=1e-6, rtol=0)  # drawn in float32
        scores = (seen @ basis @ basis.mT @ seen.mT).masked_fill(future, -torch.inf)
        wanted += 0.7 * scores.softmax(-1) @ seen @ basis @ basis.mT
    torch.testing.assert_close(layer(x), wanted)
    assert (bases[0].mT @ bases[1]).abs().max() < 1e-6


def test_a_derived_start_leaves_other_attention_alone():
    model = build("lm", attention="mhsa", mlp=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    start_as_derived(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_derived_start_needs_an_output_projection():
    model = nn.Sequential(MSSA(6, 2, 3), build("regression", heads=1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(
        ValueError, match=r"start_as_derived: MSSA must have an output .* none in 1\.layers\.0\.attn: one"
    ):
        start_as_derived(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("gamma", "scale"), [(1.0, None), (0.7, 0.5)], ids=["papers", "scaled"])
def test_a_derived_start_of_a_tied_attention(gamma, scale):
    torch.manual_seed(0)
    module, x = MSSA(6, 2, 3, tied=True, gamma=gamma, scale=scale), torch.randn(1, 5, 6, dtype=torch.float64)
    start_as_derived(module)
    out, factor = module.double()(x), gamma / module.scale
    bases = (module.scale**0.5 * module.qkv.weight.detach()).mT.unflatten(1, (2, 3)).unbind(1)
    wanted = sum(factor * (x @ u @ u.mT @ x.mT).softmax(-1) @ x @ u @ u.mT for u in bases)
    torch.testing.assert_close(out, wanted)


@pytest.mark.parametrize(("kind", "changes"), CASES)
def test_every_parameter_gets_a_gradient_and_checkpointing_changes_none(kind, changes):
    grads = []
    for saving in (False, True):
        model = build(kind, grad_checkpointing=saving, dropout=0.1, **changes)
        torch.manual_seed(3)
        run(model, inputs(kind)).square().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_ordinary_attention_passes_padding_over(causal):
    torch.manual_seed(0)
    module, x = MHSA(24, 3, causal=causal).double(), torch.randn(2, 5, 24, dtype=torch.float64)
    out = module(x, key_padding_mask=torch.arange(5) < torch.tensor([[5], [3]]))
    torch.testing.assert_close(out[:1], module(x[:1]))
    torch.testing.assert_close(out[1:, :3], module(x[1:, :3]))


def test_language_does_not_see_the_future():
    model, (tokens,) = build("lm"), inputs("lm")
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 11
    before, after = model(tokens)[0], model(changed)[0]
    assert before.shape == (2, 7, 11)
    torch.testing.assert_close(after[:, :5], before[:, :5])
    assert not torch.allclose(after[:, 5:], before[:, 5:])


def test_language_starts_out_knowing_nothing():
    """GPT-2's initialisation: near the uniform distribution, and the residual stream does not grow with depth."""
    deep: Any = build("lm", n_layer=24)
    (tokens,) = inputs("lm")
    assert deep(tokens)[0].softmax(-1).max() < 0.2
    outputs = torch.cat([layer.attn.to_out[0].weight.flatten() for layer in deep.transformer.h])
    assert outputs.std().item() == pytest.approx(0.02 * 24**-0.5, rel=0.05)
    assert deep.transformer.wte.weight.std().item() == pytest.approx(0.02, rel=0.2)


def test_a_prediction_knows_the_examples_before_it_and_its_own_question():
    model, (xs, ys) = build("regression"), inputs("regression")
    out = model(xs, ys)
    assert out.shape == (2, 6)
    other = ys.clone()
    other[:, 3] += 1
    after = model(xs, other)
    torch.testing.assert_close(after[:, :4], out[:, :4])  # it does not know its answer
    assert (after[:, 4:] != out[:, 4:]).all()
    moved = xs.clone()
    moved[:, 3] += 1
    after = model(moved, ys)
    torch.testing.assert_close(after[:, :3], out[:, :3])
    assert (after[:, 3:] != out[:, 3:]).all()


def test_vision_has_crates_stem():
    crate: Any = models.create("crate_tiny", dim=24, depth=2, heads=3, dim_head=8, image_size=8, patch_size=4)
    aot = build("vision", num_classes=1000)
    stem = [name for name in crate.state_dict() if not name.startswith("transformer.")]
    assert [name for name in aot.state_dict() if not name.startswith("layers.")] == stem
    aot.load_state_dict({k: v for k, v in crate.state_dict().items() if k in stem}, strict=False)
    seen = []
    crate.transformer.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    aot.layers[0].register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    for model in (crate, aot):
        model(*inputs("vision"))
    assert torch.equal(*seen)
    assert not any("norm" in name for name in aot.state_dict())


def test_a_cache_without_tokens_may_be_truncated():
    cache = KeyValueCache(5)
    cache.truncate(2)
    assert (cache.max_seqlen, cache.lengths, cache.keys) == (5, None, None)
    MHSA(24, 3)(torch.randn(2, 3, 24), cache=cache)
    cache.truncate(2)
    assert cache.lengths.tolist() == [2, 2]


BAD = {
    "heads": (lambda: build("lm", n_head=5), ValueError, "AoTLM: n_embd must be a multiple of n_head = 5, got 24"),
    "attention": (lambda: build("lm", attention="tssa"), ValueError, "AoTLM: attention must be one of mssa, mhsa, got"),
    "layer-heads": (lambda: Layer(24, 0, "mssa"), ValueError, "Layer: heads must be >= 1, got 0"),
    "layer-width": (lambda: Layer(24, 5, "mssa"), ValueError, "Layer: dim must be a multiple of heads = 5, got 24"),
    "layer-kind": (lambda: Layer(24, 3, "tssa"), ValueError, "Layer: attention must be one of mssa, mhsa, got 'tssa'"),
    "layer-eta": (lambda: Layer(24, 3, "mssa", eta="1"), TypeError, "Layer: eta must be a number, got str"),
    "cache": (lambda: KeyValueCache(0), ValueError, "KeyValueCache: max_seqlen must be >= 1, got 0"),
    "mhsa-heads": (lambda: MHSA(24, 5), ValueError, "MHSA: dim must be a multiple of heads = 5, got 24"),
    "mhsa-none": (lambda: MHSA(24, 0), ValueError, "MHSA: heads must be >= 1, got 0"),
    "patch": (
        lambda: build("vision", patch_size=3),
        ValueError,
        "AoTVision: image_size must be a multiple .*8x8 by 3x3",
    ),
    "long": (
        lambda: build("lm")(torch.zeros(1, 10, dtype=torch.long)),
        ValueError,
        "AoTLM: tokens must be at most block_size = 9 long, got 10",
    ),
    "image": (lambda: build("vision")(torch.ones(1, 3, 12, 12)), ValueError, "AoTVision: img must have 8x8 pixels"),
    "dims": (
        lambda: build("regression")(torch.ones(1, 2, 5), torch.ones(1, 2)),
        ValueError,
        r"AoTRegression: xs must be \(batch, examples <= 6, n_dims=4\), got \(1, 2, 5\)",
    ),
    "examples": (lambda: build("regression")(torch.ones(1, 7, 4), torch.ones(1, 7)), ValueError, "examples <= 6"),
    "answers": (
        lambda: build("regression")(torch.ones(1, 2, 4), torch.ones(1, 3)),
        ValueError,
        r"AoTRegression: ys must be \(batch, examples\) = \(1, 2\), got \(1, 3\)",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), BAD.values(), ids=BAD)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
