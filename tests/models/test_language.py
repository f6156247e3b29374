"""The language models: loss, positions, start, hooks, checkpoints. Their equations are in test_restated."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from crate_kernels import models
from crate_kernels.models.crate_lm import TiedISTA
from tests.models.families import TEXT, build, drawn, inputs

FAMILIES = ["crate_lm", "crate_lm_overcomplete", "tost_lm"]


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_is_the_mean_over_wanted_targets(family):
    model, (tokens,) = drawn(build(family)), inputs(family)
    targets = tokens.roll(-1, 1)
    targets[0, 3:] = -1
    logits, loss = model(tokens, targets)
    chosen = logits.log_softmax(-1).gather(2, targets.clamp(min=0)[..., None])[..., 0]
    assert_close(loss, -chosen[targets >= 0].mean())
    assert torch.equal(model(tokens)[0], logits)
    assert model(tokens)[1] is None
    assert torch.equal(model(tokens.int())[0], logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_token_sees_a_later_one(family):
    model, (tokens,) = drawn(build(family).double()), inputs(family)
    changed = tokens.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % 11
    before, after = model(tokens)[0], model(changed)[0]
    assert_close(after[:, :4], before[:, :4])
    assert not torch.isclose(after[:, 4:], before[:, 4:]).all(-1).any()


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_on_caches_are_where_their_offsets_say(family):
    model, (tokens,) = drawn(build(family).double()).eval(), inputs(family)
    with torch.no_grad():
        caches = model.new_caches(2, 9)
        parts = [
            model.hidden(tokens[:, start:stop], caches=caches, offsets=torch.full((2,), start))
            for start, stop in ((0, 3), (3, 7))
        ]
        assert_close(torch.cat(parts, 1), model.hidden(tokens))


@pytest.mark.parametrize("family", FAMILIES)
def test_start_is_the_published_one(family):
    model = build(family, n_embd=96, vocab_size=500)
    assert model.lm_head.weight is model.transformer["wte"].weight
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            std = 0.02 / math.sqrt(2 * 2) if name.endswith("c_proj") else 0.02
            assert abs(module.weight.std() / std - 1) < 5 / (2 * module.weight.numel()) ** 0.5, name
            assert getattr(module, "bias", None) is None or not module.bias.any()
    for block in model.transformer["h"]:
        if family == "tost_lm":
            assert_close(torch.stack([block.gamma1, block.gamma2]), torch.full((2, 96), 1e-5))
            assert not block.attn.denom_bias.any()
        else:
            bound = (6 / 96) ** 0.5
            assert 0.95 * bound < block.ista.weight.abs().max() <= bound


def test_numbers_that_no_checkpoint_holds_reach_the_layers():
    options = {"ista": 0.2, "lambd": 0.3}
    for family in FAMILIES[:2]:
        codes = [block.ista for block in build(family, **options).transformer["h"]]
        assert [(code.step_size, code.lambd) for code in codes] == [(0.2, 0.3)] * 2
    model = build("crate_lm_overcomplete", steps=3, overcomplete_ratio=2)
    assert [(b.ista.steps, tuple(b.ista.weight.shape)) for b in model.transformer["h"]] == [(3, (48, 24))] * 2
    assert_close(build("tost_lm", eta=0.5).transformer["h"][0].gamma1, torch.full((24,), 0.5))


def test_the_published_class_finds_its_masks():
    model = build("crate_lm")
    state = models.to_official(model)
    masks = {f"transformer.h.{i}.attn.bias" for i in range(2)}
    assert set(state) == set(model.state_dict()) | masks
    for name in masks:
        assert torch.equal(state[name], torch.ones(9, 9).tril()[None, None])
    assert set(models.to_official(build("crate_lm_overcomplete"))) == set(build("crate_lm_overcomplete").state_dict())


@pytest.mark.parametrize("family", FAMILIES[:2])
def test_the_mask_of_published_checkpoints_is_dropped(family):
    source = drawn(build(family))
    config = {**TEXT, "dropout": 0.0, "bias": True}
    masks = {f"transformer.h.{i}.attn.bias": torch.ones(9, 9).tril()[None, None] for i in range(2)}
    model = models.from_official(family, {"model": {**source.state_dict(), **masks}}, config)
    (tokens,) = inputs(family)
    assert torch.equal(model(tokens)[0], source(tokens)[0])
    assert set(model.state_dict()) == set(source.state_dict())
    other = {**source.state_dict(), "transformer.h.0.attn.c_attn.bias": torch.zeros(24)}
    with pytest.raises(ValueError, match=r"unexpected transformer.h.0.attn.c_attn.bias"):
        models.from_official(family, other, config)


def test_a_checkpoint_whose_head_is_not_its_embedding_is_refused():
    """One weight cannot hold both."""
    state = drawn(build("crate_lm")).state_dict()
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    with pytest.raises(ValueError, match=r"lm_head.weight must equal transformer.wte.weight, which it shares here"):
        models.from_official("crate_lm", state, TEXT)


UNFIT = {  # what a weight of (11, 24) must not be, and what is said of it
    "sparse": (lambda t: t.to_sparse(), "must be dense and hold values, got torch.sparse_coo on cpu"),
    "compressed": (lambda t: t.to_sparse_csr(), "must be dense and hold values, got torch.sparse_csr on cpu"),
    "mkldnn": (lambda t: t.to_mkldnn(), "must be dense and hold values, got torch._mkldnn on cpu"),
    "nested": (lambda t: torch.nested.nested_tensor([t, t]), "must be dense and hold values, got nested on cpu"),
    "meta": (lambda t: t.to("meta"), "must be dense and hold values, got torch.strided on meta"),
    "complex": (lambda t: t + 0j, "must have a floating dtype, got torch.complex64"),
    "list": (lambda t: t.tolist(), "must be a Tensor, got list"),
    "deeper": (lambda t: t[None], "must be (11, 24), got (1, 11, 24)"),
}


@pytest.mark.parametrize("names", [["wte"], ["head"], ["wte", "head"]], ids=["first", "second", "both"])
@pytest.mark.parametrize(("change", "fault"), UNFIT.values(), ids=UNFIT)
@pytest.mark.filterwarnings("ignore:.*(in beta state|prototype stage):UserWarning")  # PyTorch of its layouts
def test_a_tied_weight_that_does_not_fit_is_named(change, fault, names, tmp_path):
    """One of two names of a tensor may hold what cannot be compared with the other."""
    model, spelt = build("crate_lm"), {"wte": "transformer.wte.weight", "head": "lm_head.weight"}
    state = model.state_dict()
    state.update({spelt[name]: change(state[spelt[name]]) for name in names})
    for call in (
        lambda: models.from_official("crate_lm", state, TEXT),
        lambda: model.save_pretrained(tmp_path / "model", state_dict=state),
    ):
        with pytest.raises(ValueError, match="state_dict does not fit the") as caught:
            call()
        assert str(caught.value).split("\n  ")[1:] == [f"{spelt[name]} {fault}" for name in names]
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn], ids=["fp16", "fp8"])
def test_a_tied_weight_is_compared_by_its_numbers(dtype):
    model, name, other = build("crate_lm"), "transformer.wte.weight", "lm_head.weight"
    coarse = model.state_dict()[name].to(dtype)
    state = {**model.state_dict(), name: coarse, other: coarse.float()}
    loaded = models.from_official("crate_lm", state, TEXT)
    assert torch.equal(loaded.lm_head.weight, coarse.float())
    state[other] = coarse.float() + 1
    with pytest.raises(ValueError, match=f"{other} must equal {name}, which it shares here"):
        models.from_official("crate_lm", state, TEXT)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_may_be_a_matrix_of_its_own(family):
    tied, untied = (build(family, tie_word_embeddings=tie) for tie in (True, False))
    head, embedding = untied.lm_head.weight, untied.transformer["wte"].weight
    assert untied.num_parameters() == tied.num_parameters() + head.numel()
    (tokens,) = inputs(family)
    untied(tokens, tokens)[1].backward()
    assert not torch.equal(head.grad, embedding.grad)
    untied.zero_grad()
    with torch.no_grad():
        untied.load_state_dict(tied.state_dict())
        assert_close(untied(tokens)[0], tied(tokens)[0], rtol=0, atol=0)
        head.zero_()
        assert untied(tokens)[0].abs().max() == 0
    with pytest.raises(ValueError, match="to_official: model must be of"):
        models.to_official(untied)
    with pytest.raises(ValueError, match=r"arguments must be among .*; got tie_word_embeddings"):
        models.from_official(family, tied.state_dict(), {"n_head": 3, "tie_word_embeddings": False})


TSSA = {"published": {"TSSA": True}, "unsaid": {}}


@pytest.mark.parametrize("options", TSSA.values(), ids=TSSA)
def test_tost_lm_takes_the_published_flag(options):
    config = {**TEXT, "bias": False}
    state = build("tost_lm").state_dict()
    assert models.from_official("tost_lm", state, {**config, **options}).config == build("tost_lm").config
    with pytest.raises(ValueError, match="TSSA must be True for tost_lm, got False"):
        models.from_official("tost_lm", state, {**config, "TSSA": False})


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_hook_on_the_code_changes_nothing_by_watching(steps):
    torch.manual_seed(0)
    module = TiedISTA(6, 24, steps, step_size=0.2, lambd=0.3).double()
    x, seen = torch.randn(2, 5, 6, dtype=torch.float64), []
    fused = module(x)
    handle = module.code.register_forward_hook(lambda m, args, out: seen.append(out))
    assert_close(module(x), fused)
    assert_close(seen[0], module.encode(x))
    assert (seen[0] >= 0).all()
    assert seen[0].shape == (2, 5, 24)
    handle.remove()
    module.code.register_forward_pre_hook(lambda m, args: (args[0] * 0,))
    assert not module(x).any()


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_every_kind_of_hook_on_the_code_fires(kind):
    torch.manual_seed(0)
    module, seen = TiedISTA(6, 24, 2), []
    getattr(module.code, f"register_{kind}_hook")(lambda *_: seen.append(kind))
    module(torch.randn(2, 5, 6)).sum().backward()
    assert seen == [kind]


def test_a_channel_of_the_code_or_the_projection_can_be_overridden():
    model, (tokens,) = drawn(build("crate_lm_overcomplete").double()), inputs("crate_lm_overcomplete")

    def silence(module, args, out):
        return torch.where(torch.arange(out.shape[-1]) == 3, 0.0, out)

    before = model(tokens)[0]
    block = model.transformer["h"][1]
    for module, weight in ((block.ista.code, block.ista.weight), (block.attn.c_attn, block.attn.c_attn.weight)):
        handle = module.register_forward_hook(silence)
        hooked = model(tokens)[0]
        handle.remove()
        assert not torch.allclose(hooked, before)
        assert_close(model(tokens)[0], before)
        if module is block.attn.c_attn:  # the same as without the channel's row
            kept = weight.detach().clone()
            with torch.no_grad():
                weight[3] = 0
                assert_close(model(tokens)[0], hooked)
                weight.copy_(kept)


def call(family="crate_lm", tokens=None, **changes):
    return build(family, **changes)(inputs(family)[0] if tokens is None else tokens)


BAD = {
    "long": (
        lambda: call(tokens=torch.zeros(1, 10).long()),
        ValueError,
        "tokens must be at most block_size = 9 long, got",
    ),
    "float": (lambda: call(tokens=torch.zeros(1, 4)), ValueError, r"CRATELM: tokens must be int64 or int32 \(batch"),
    "rank": (lambda: call(tokens=torch.zeros(4).long()), ValueError, r"tokens must be .*, got torch.int64 \(4,\)"),
    "list": (lambda: call("tost_lm", [[1]]), TypeError, "ToSTLM: tokens must be a Tensor .*, got list"),
    "targets": (
        lambda: build("tost_lm")(torch.zeros(1, 4).long(), torch.zeros(1, 3).long()),
        ValueError,
        r"ToSTLM: targets must be tokens' shape \(1, 4\), got \(1, 3\)",
    ),
    "vocabulary": (
        lambda: call(tokens=torch.tensor([[0, 11, 3]])),
        ValueError,
        "CRATELM: tokens must be 0 to 10, got 11",
    ),
    "negative": (lambda: call("tost_lm", torch.tensor([[0, -1]])), ValueError, "tokens must be 0 to 10, got -1"),
    "prompt": (
        lambda: build("aot_lm").generate(torch.tensor([[50256]]), 1),
        ValueError,
        "AoTLM: tokens must be 0 to 10, got 50256",
    ),
    "target": (
        lambda: build("tost_lm")(torch.zeros(1, 4).long(), torch.tensor([[1, -1, -100, 3]])),
        ValueError,
        "ToSTLM: targets must be -1 to 10, got -100",
    ),
    "heads": (lambda: call(n_head=5), ValueError, "CRATELM: n_embd must be a multiple of n_head = 5, got 24"),
    "tied-hidden": (lambda: TiedISTA(4, 0), ValueError, "TiedISTA: hidden must be >= 1, got 0"),
    "unsaid-heads": (
        lambda: models.from_official("crate_lm", {}, {"n_embd": 24}),
        ValueError,
        "from_official: config must give n_head",
    ),
    "tied-steps": (lambda: TiedISTA(4, 8, 0), ValueError, "TiedISTA: steps must be >= 1, got 0"),
}


@pytest.mark.parametrize(("function", "error", "message"), BAD.values(), ids=BAD)
def test_bad_input(function, error, message):
    with pytest.raises(error, match=message):
        function()


def test_tokens_are_not_read_where_that_would_wait():
    """As on a GPU: tensors without values stand for those that the host cannot see."""
    with torch.device("meta"):
        model, tokens = build("crate_lm"), torch.zeros(1, 4, dtype=torch.long)
        assert model(tokens, tokens)[1].is_meta


def test_a_compiled_model_reads_no_tokens():
    model = build("crate_lm")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    tokens = torch.tensor([[0, 3, 1]])
    assert torch.equal(compiled(tokens, tokens)[1], model(tokens, tokens)[1])
