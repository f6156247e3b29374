"""Generation by a CUDA graph: the tokens of eager steps, and what is refused. Without a GPU, graphs are stand-ins."""

from types import SimpleNamespace

import pytest
import torch

from crate_kernels import SubspaceCache
from crate_kernels.models._shared import generate, graphed
from crate_kernels.models.aot import KeyValueCache
from tests.models.families import build
from tests.models.test_generate import CASES, COUNTS, FAMILIES, language, prompts
from tests.tools import graphs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def made(monkeypatch):
    """Return the graphs that are captured."""
    if DEVICE == "cpu":
        graphs.stand_in(monkeypatch)
    return graphs.Graph.made


@pytest.mark.parametrize("backend", [None, "composite"] if DEVICE == "cuda" else [None])  # on a CPU the same one
@pytest.mark.parametrize("count", [COUNTS["within"], COUNTS["beyond"]], ids=["within", "beyond"])
@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_eager_steps(family, lengths, count, backend, made):
    model, prompt_rows = language(family, backend=backend).to(DEVICE), [row.to(DEVICE) for row in prompts(*lengths)]
    expected = model.generate(prompt_rows, count, temperature=0)
    actual = model.generate(prompt_rows, count, temperature=0, cuda_graph=True)
    assert [row.tolist() for row in actual] == [row.tolist() for row in expected]
    if DEVICE == "cpu":
        (graph,) = made
        within = min(count, model.config.block_size - max(lengths) + 1)
        assert graph.replays == within - 1 - graphed._CALLED


@pytest.mark.parametrize("cache", [SubspaceCache, KeyValueCache], ids=lambda cache: cache.__name__)
def test_steps_of_one_length_are_wrong_for_others(cache, made, monkeypatch):
    """What a cache counts on the host is the capture's: the stand-in shows what ``_make_replayable`` is for."""
    model = language({SubspaceCache: "crate_lm", KeyValueCache: "aot_mhsa_lm"}[cache], backend="composite").to(DEVICE)
    tokens = prompts(5)[0][None].to(DEVICE)
    expected = model.generate(tokens, 20, temperature=0)
    monkeypatch.setattr(cache, "_make_replayable", lambda self, new: None)
    assert not torch.equal(model.generate(tokens, 20, temperature=0, cuda_graph=True), expected)


@pytest.mark.parametrize("lengths", [(4, 4), (4, 2)], ids=["equal", "ragged"])
@pytest.mark.parametrize("options", [{}, {"top_k": 7}, {"top_p": 0.8, "temperature": 0.7}], ids=["all", "k", "p"])
def test_sampled_tokens_are_those_of_eager_steps(options, lengths, made):
    model, prompt_rows = language("tost_lm").to(DEVICE), [row.to(DEVICE) for row in prompts(*lengths)]
    texts = []
    for cuda_graph in (False, True):
        generator = torch.Generator(DEVICE).manual_seed(3)
        found = model.generate(prompt_rows, 16, generator=generator, cuda_graph=cuda_graph, **options)
        texts.append([row.tolist() for row in found])
    assert texts[0] == texts[1]
    if DEVICE == "cpu":
        assert made[0].generators == [generator]


def test_draws_without_waiting_are_those_of_multinomial():
    logits = torch.randn(500, 40, generator=torch.Generator().manual_seed(0))
    first, second = (
        generate.Sampling(generator=torch.Generator().manual_seed(1)).choose(logits, waits) for waits in (True, False)
    )
    assert torch.equal(first, second)


@pytest.mark.parametrize("use", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_under_autocast_and_inference_mode(dtype, use, made):
    model, tokens = language("crate_lm").to(DEVICE, dtype), torch.stack(prompts(4, 4)).to(DEVICE)
    with use(), torch.autocast(DEVICE, torch.bfloat16):
        expected, actual = (model.generate(tokens, 12, temperature=0, cuda_graph=g) for g in (False, True))
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("count", [0, 1, 1 + graphed._CALLED])
def test_few_tokens_are_not_worth_a_capture(count, made):
    model, tokens = language("crate_lm").to(DEVICE), prompts(4)[0][None].to(DEVICE)
    expected = model.generate(tokens, count, temperature=0)
    assert torch.equal(model.generate(tokens, count, temperature=0, cuda_graph=True), expected)
    assert made == []


def foreign(model):
    """Give the first layer a cache that is not of this library."""
    attn = model.transformer["h"][0].attn
    attn.new_cache = lambda batch, max_seqlen: SimpleNamespace()
    attn.forward = lambda x, **options: x
    return model


TOKENS = torch.zeros(1, 3).long()
BAD = {
    "cpu": (
        lambda m: m.generate(TOKENS, 1, cuda_graph=True),
        ValueError,
        "CRATELM.generate: tokens must be on a CUDA device with cuda_graph=True, got cpu",
    ),
    "flag": (
        lambda m: m.generate(TOKENS, 1, cuda_graph=1),
        TypeError,
        "CRATELM.generate: cuda_graph must be a bool, got int",
    ),
}
BAD_THERE = {
    "no-cache": (
        lambda m, tokens: m.generate(tokens, 1, cuda_graph=True, use_cache=False),
        ValueError,
        "CRATELM.generate: use_cache must be True with cuda_graph=True",
    ),
    "reference": (
        lambda m, tokens: build("crate_lm", backend="reference").generate(tokens, 1, cuda_graph=True),
        ValueError,
        "CRATELM.generate: backend must not be 'reference' with cuda_graph=True",
    ),
    "cache": (
        lambda m, tokens: foreign(m).generate(tokens, 3, cuda_graph=True),
        NotImplementedError,
        "CRATELM.generate: cuda_graph must be False with caches of type SimpleNamespace",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), BAD.values(), ids=BAD)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call(build("crate_lm"))


@pytest.mark.parametrize(("call", "error", "message"), BAD_THERE.values(), ids=BAD_THERE)
def test_what_no_graph_make_replayables(call, error, message, made):
    with pytest.raises(error, match=message):
        call(build("crate_lm").to(DEVICE), TOKENS.to(DEVICE))
