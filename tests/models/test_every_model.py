"""What holds for every family: keys, gradients, compilation, precision, weight decay, fields."""

import re
from collections import Counter
from dataclasses import fields, replace

import pytest
import torch
from torch import nn

from crate_kernels import patch
from crate_kernels.models import redunet
from tests.models.families import FAMILIES, build, drawn, inputs, output

LAYER_NORM = ("weight", "bias")
BLOCKS = {  # names before the layers, how a layer's begin, those of a layer, and those after
    "crate": (
        ["pos_embedding", "cls_token", *(f"to_patch_embedding.{i}.*" for i in (1, 2, 3))],
        "transformer.layers.",
        ["0.norm.*", "0.fn.qkv.weight", "0.fn.to_out.0.*", "1.norm.*", "1.fn.weight"],
        ["mlp_head.0.*", "mlp_head.1.*"],
    ),
    "crate_alpha": (
        ["conv1.weight", "conv1.bias", "pos_embedding", "cls_token"],
        "transformer.layers.",
        ["0.norm.*", "0.fn.qkv.weight", "0.fn.to_out.0.weight", "1.norm.*", "1.fn.D", "1.fn.D1"],
        ["mlp_head.0.*", "mlp_head.1.*"],
    ),
    "tost_lm": (
        ["transformer.wte.weight", "transformer.wpe.weight", "transformer.ln_f.weight", "lm_head.weight"],
        "transformer.h.",
        [
            *(f"attn.{name}" for name in ("c_attn.weight", "c_proj.weight", "temp", "denom_bias")),
            *("ln_1.weight", "ln_2.weight", "mlp.c_fc.weight", "mlp.c_proj.weight", "gamma1", "gamma2"),
        ],
        [],
    ),
    "crate_lm": (
        ["transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"],
        "transformer.h.",
        ["prenorm_1.*", "attn.c_attn.weight", "attn.c_proj.*", "prenorm_2.*", "ista.weight"],
        [],
    ),
}
BLOCKS["crate_lm_overcomplete"] = (BLOCKS["crate_lm"][0], *BLOCKS["crate_lm"][1:3], ["transformer.ln_f.*"])


def spelled(names):
    return {full for name in names for full in ([name[:-1] + n for n in LAYER_NORM] if name[-1] == "*" else [name])}


@pytest.mark.parametrize("family", BLOCKS)
def test_state_dict_keys(family):
    before, prefix, block, after = BLOCKS[family]
    layers = {f"{prefix}{i}.{name}" for i in range(2) for name in spelled(block)}
    assert set(build(family).state_dict()) == spelled(before) | layers | spelled(after)


def test_state_dict_keys_of_mae():
    attention = ["{}.norm.*", "{}.fn.qkv.weight", "{}.fn.to_out.0.*"]
    code = ["{}.norm.*", "{}.fn.weight"]
    wanted = ["cls_token", "mask_token", "pos_embed", "decoder_pos_embed", "patch_embed.proj.*", "norm.*"]
    wanted += ["decoder_embed.*", "decoder_norm.*", "decoder_pred.*"]
    for i in range(2):
        wanted += [name.format(f"blocks.{i}.layers.0.0") for name in attention]
        wanted += [name.format(f"blocks.{i}.layers.0.1") for name in code]
        wanted += [name.format(f"decoder_blocks.{i}.layers.0.0") for name in code]
        wanted += [name.format(f"decoder_blocks.{i}.layers.0.1") for name in attention]
    assert set(build("crate_mae").state_dict()) == spelled(wanted)


def test_state_dict_keys_of_the_encoder_of_mae():
    whole = set(build("crate_mae").state_dict())
    encoder = {name for name in whole if not name.startswith(("decoder", "mask_token"))}
    assert set(build("crate_mae_encoder").state_dict()) == encoder | {"head.weight", "head.bias"}


def test_state_dict_keys_of_tost():
    wanted = ["cls_token", "pos_embeder.token_projection.*", "norm.*", "head.*"]
    for i in (0, 2, 4):
        norm = f"patch_embed.proj.{i}.1."
        wanted += [f"patch_embed.proj.{i}.0.weight", f"{norm}*", f"{norm}running_mean", f"{norm}running_var"]
        wanted += [f"{norm}num_batches_tracked"]
    block = ["norm1.*", "norm2.*", "mlp.fc1.*", "mlp.fc2.*", "gamma1", "gamma2", "attn.qkv.*"]
    for i in range(2):
        wanted += [f"blocks.{i}.{name}" for name in [*block, "attn.temp", "attn.to_out.0.*"]]
        wanted += [f"cls_attn_blocks.{i}.{name}" for name in [*block, "attn.proj.*"]]
    assert set(build("tost").state_dict()) == spelled(wanted)


def gradients(family, model, forward):
    """Gradients of a loss that everything enters, after the same draws of dropout."""
    torch.manual_seed(3)
    out = output(family, forward(*inputs(family)))
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(4))
    used = [p for p in model.parameters() if p.requires_grad]
    return torch.autograd.grad(out, used, upstream, allow_unused=True)


def equal(actual, expected, **options):
    for a, e in zip(actual, expected, strict=True):
        assert (a is None) == (e is None)
        if a is not None:
            torch.testing.assert_close(a, e, **options)


RATES = {  # options, and how many Dropout modules they fill
    "crate": (("dropout", "emb_dropout", "drop_path_rate"), 1 + 2 * 2),
    "crate_alpha": (("dropout", "emb_dropout", "drop_path_rate"), 1 + 2 * 2),
    "crate_mae": (("dropout",), 2 * 2 + 2 * 2),
    "crate_mae_encoder": (("dropout", "drop_path_rate"), 2 * 2),
    "tost": (("drop_rate", "attn_drop_rate", "drop_path_rate"), 1 + 2 * 3 + 2 * 3),
    "crate_lm": (("dropout",), 1 + 2 * 2),
    "crate_lm_overcomplete": (("dropout",), 1 + 2 * 2),
    "aot_vision": (("dropout", "drop_path_rate"), 2 * 2),
    "aot_lm": (("dropout",), 1 + 2 * 2),
    "aot_regression": (("dropout",), 2 * 2),
    "tost_lm": (("dropout",), 1 + 2 * 3),
}
DROPOUT = {family: dict.fromkeys(names, 0.2) for family, (names, _) in RATES.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_reaches_every_layer_and_stops_in_evaluation(family):
    model = build(family, **DROPOUT[family])
    assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == [0.2] * RATES[family][1]
    first, second = (output(family, model(*inputs(family))) for _ in range(2))
    assert not torch.equal(first, second)
    model.eval()
    assert torch.equal(output(family, model(*inputs(family))), output(family, model(*inputs(family))))


EMBEDDED = {  # dropout of the embedding alone where it has a separate rate, and where it can be seen
    "crate": ({"emb_dropout": 0.5, "dropout": 0.25}, "transformer"),
    "crate_alpha": ({"emb_dropout": 0.5, "dropout": 0.25}, "transformer"),
    "crate_lm": ({"dropout": 0.5}, "transformer.h.0"),
}


@pytest.mark.parametrize("family", EMBEDDED)
def test_the_embedded_tokens_are_dropped_out(family):
    rates, first = EMBEDDED[family]
    model, seen = build(family, **rates), []
    found = [m.p for m in model.modules() if isinstance(m, nn.Dropout)]
    assert found == [0.5, *[rates["dropout"]] * 4]  # then of the weights and the output of both layers
    model.get_submodule(first).register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    for training in (True, False):
        model.train(training)(*inputs(family))
    kept = seen[0] != 0
    assert 0 < kept.sum() < kept.numel()
    torch.testing.assert_close(seen[0][kept], 2 * seen[1][kept])


LAYERS = r"(^layers\.\d|transformer\.layers\.\d\.0|blocks\.\d|\.h\.\d)$"  # of CRATE and CRATE-alpha the first half


@pytest.mark.parametrize("dropout", [False, True], ids=["plain", "dropout"])
@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointing_changes_no_gradient(family, dropout):
    rates = DROPOUT[family] if dropout else {}
    plain, saving = build(family, **rates), build(family, **rates, grad_checkpointing=True)
    runs = Counter()
    for name, module in saving.named_modules():
        if re.search(LAYERS, name):
            module.register_forward_pre_hook(lambda m, args, name=name: runs.update([name]))
    equal(gradients(family, saving, saving), gradients(family, plain, plain), rtol=0, atol=0)
    assert len(runs) == {"crate_mae": 4, "tost": 4}.get(family, 2)
    assert set(runs.values()) == {2}
    with torch.no_grad():
        saving(*inputs(family))
    assert set(runs.values()) == {3}


AHEAD = ("crate", "crate_lm_overcomplete", "tost_lm")  # of the others, the gradients are eager's
IN_ONE_GRAPH = [(family, "aot_eager" if family in AHEAD else "eager") for family in FAMILIES]
IN_ONE_GRAPH += [
    pytest.param(family, "aot_eager", marks=pytest.mark.exhaustive) for family in FAMILIES if family not in AHEAD
]


@pytest.mark.parametrize(("family", "backend"), IN_ONE_GRAPH)
def test_compiles_in_one_graph(family, backend):
    model = build(family, **{"n_layer" if "lm" in family else "depth": 1})
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    equal(gradients(family, model, compiled), gradients(family, model, model))


def cast(inputs, dtype):
    return [t.to(dtype) if t is not None and t.is_floating_point() else t for t in inputs]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_autocast_is_as_exact_as_the_naive_form(family, dtype):
    """Twice the error of the same model on ``reference``, as for the operators."""
    fast, naive = drawn(build(family)).eval(), drawn(build(family, backend="reference")).eval()
    tensors = inputs(family)
    with torch.autocast("cpu", dtype):
        out, eager = output(family, fast(*tensors)), output(family, naive(*tensors))
    exact = output(
        family, naive.double()(*(t.double() if t is not None and t.is_floating_point() else t for t in tensors))
    )
    assert out.dtype == eager.dtype == dtype
    assert out.isfinite().all()
    published = (eager - exact).abs().max()
    assert (out - exact).abs().max() <= 2 * (published + torch.finfo(dtype).eps * exact.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_in_half_precision_trains(family):
    model = build(family).bfloat16()
    out = output(family, model(*cast(inputs(family), torch.bfloat16)))
    assert out.dtype == torch.bfloat16
    out.float().square().mean().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_backend_reaches_every_operator(family):
    model = build(family, backend="nowhere")
    assert {m.backend for m in model.modules() if hasattr(m, "backend")} == {"nowhere"}
    with pytest.raises(ValueError, match="backend must be None or one of"):
        model(*inputs(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_patch_has_nothing_left_to_fuse(family):
    report = patch(build(family))
    assert not report.replaced
    assert set(report.left.values()) == {"already fused: a module of crate_kernels.nn"}


@pytest.mark.parametrize("family", FAMILIES)
def test_empty_batch(family):
    model = build(family).eval()
    empty, one = (output(family, model(*inputs(family, batch))) for batch in (0, 1))
    assert empty.shape == (0, *one.shape[1:])


# What is not decayed, beside vectors; of other families nothing.
SPARED = {
    "crate_alpha": {"cls_token", "pos_embedding"}
    | {f"transformer.layers.{i}.1.fn.{name}" for i in range(2) for name in ("D", "D1")},
    "tost": {"cls_token", "blocks.0.attn.temp", "blocks.1.attn.temp"},
    "tost_lm": {f"transformer.h.{i}.attn.{name}" for i in range(2) for name in ("temp", "denom_bias")},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_weight_decay_groups(family):
    model = build(family)
    decayed, plain = model.parameter_groups(0.3)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    sorted_in = [names[id(p)] for group in (decayed, plain) for p in group["params"]]
    assert sorted(sorted_in) == sorted(trainable)
    vectors = {name for name in trainable if model.get_parameter(name).dim() < 2}
    expected = set() if family == "crate" else vectors | SPARED.get(family, set())
    assert {names[id(p)] for p in plain["params"]} == expected
    torch.optim.AdamW([decayed, plain], lr=1e-3)
    with pytest.raises(ValueError, match="weight_decay must be >= 0"):
        model.parameter_groups(-1.0)


# A value of another type for each annotation, and what the field must be.
WRONG = {
    "int": ("24", "an int"),
    "fields.Count": ("24", "an int"),
    "float": ("0.5", "a number"),
    "fields.Rate": ("0.5", "a number"),
    "bool": (1, "a bool"),
    "str": (7, "a string"),
    "str | None": (7, "None or a string"),
    "vision.Size": (8.0, r"an int or \(height, width\)"),
}
# A value out of the range of each annotation that has one.
OUT_OF_RANGE = {"int": (0, ">= 1"), "fields.Count": (-1, ">= 0"), "fields.Rate": (1.0, "< 1.0")}
EVERY_CONFIG = {
    **{name: config for name, (_, config) in FAMILIES.items()},
    "redunet_vector": redunet.ReduNetVectorConfig(2, 2, 4),
    "redunet_1d": redunet.ReduNet1DConfig(2, 2, 4, 5),
    "redunet_2d": redunet.ReduNet2DConfig(2, 2, 4, 5, 5),
}


@pytest.mark.parametrize("family", EVERY_CONFIG)
def test_every_field_has_its_type(family):
    config = EVERY_CONFIG[family]
    owner = type(config).__name__.removesuffix("Config")
    owner = "ReduNet" if owner.startswith("ReduNet") else owner
    for field in fields(config):
        kind, _, optional = field.type.partition(" | ")
        value, expected = WRONG.get(field.type) or WRONG[kind]
        got = type(value).__name__
        with pytest.raises(TypeError, match=f"^{owner}: {field.name} must be {expected}, got {got}$"):
            replace(config, **{field.name: value})
        if not optional:
            with pytest.raises(TypeError, match=f"^{owner}: {field.name} must be .*, got NoneType$"):
                replace(config, **{field.name: None})
        if kind in OUT_OF_RANGE:
            value, expected = OUT_OF_RANGE[kind]
            with pytest.raises(ValueError, match=f"^{owner}: {field.name} must be {expected}, got {value}$"):
                replace(config, **{field.name: value})
        if kind in ("float", "fields.Rate"):
            with pytest.raises(ValueError, match=f"^{owner}: {field.name} must be finite, got nan$"):
                replace(config, **{field.name: float("nan")})


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_is_made_from_a_config_of_its_class(name):
    model, config = FAMILIES[name][0], type(build(name).config).__name__
    with pytest.raises(TypeError, match=rf"^{model.__name__}: config must be a {config}, got dict$"):
        model({"dim": 48})
    with pytest.raises(TypeError, match=rf"config must be a {config}, got NoneType$"):
        model()
    said = rf"got the argument 'dim': write {model.__name__}\({config}\(dim=...\)\)$"
    with pytest.raises(TypeError, match=said):
        model(dim=48, depth=2)
