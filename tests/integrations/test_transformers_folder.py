"""One folder serves transformers and us: what one writes the other reads, sharded too."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: the extra hf")
from huggingface_hub import ModelCard
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification

from crate_kernels import models
from crate_kernels.integrations.transformers import card
from tests.integrations import images, language
from tests.models import families

FAMILIES = {
    **{family: (language.pair, AutoModelForCausalLM, language.prompts) for family in language.CONFIGS},
    **{family: (images.pair, AutoModelForImageClassification, None) for family in images.CONFIGS},
}


def example_of(family, inputs):
    return images.images(family) if inputs is None else inputs()


def logits(ours, example):
    out = ours(example)
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_our_folder(family, tmp_path):
    pair, auto, inputs = FAMILIES[family]
    ours, _ = pair(family)
    ours.save_pretrained(tmp_path)
    model, report = auto.from_pretrained(tmp_path, output_loading_info=True, backend="reference")
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [type(model).__name__]
    assert model.config.backend == "reference"
    assert not any(p.is_meta for p in model.parameters())
    example = example_of(family, inputs)
    torch.testing.assert_close(model.eval()(example).logits, logits(ours, example), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shards", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_we_read_the_folder_of_transformers(family, shards, tmp_path):
    pair, auto, inputs = FAMILIES[family]
    ours, model = pair(family)
    model.save_pretrained(tmp_path, **({"max_shard_size": "8KB"} if shards else {}))
    assert (tmp_path / "model.safetensors").exists() != shards
    again = models.from_pretrained(tmp_path, backend="reference").eval()
    assert again.state_dict().keys() == ours.state_dict().keys()
    for name, tensor in ours.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    assert again.config == type(ours.config)(**{**vars(again.config), "backend": "reference"})
    example = example_of(family, inputs)
    reread = auto.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(reread(example).logits, logits(ours, example), rtol=0, atol=0)


def test_a_folder_of_another_number_of_classes_keeps_all_but_the_head(tmp_path):
    ours, _ = images.pair("crate")
    ours.save_pretrained(tmp_path)
    model = AutoModelForImageClassification.from_pretrained(tmp_path, num_labels=3, ignore_mismatched_sizes=True)
    assert model.model.mlp_head[1].weight.shape == (3, 24)
    assert bool(model.model.mlp_head[1].weight.std() > 0)
    assert torch.equal(model.model.cls_token, ours.cls_token)
    assert model.config.num_classes == 3


def test_a_pre_trained_autoencoder_becomes_a_classifier(tmp_path):
    whole = families.build("crate_mae", seed=3).eval()
    with torch.no_grad():
        for parameter in whole.parameters():
            if parameter.requires_grad:  # the positions are fixed
                parameter.add_(0.1)
    whole.save_pretrained(tmp_path / "ours")
    load = AutoModelForImageClassification.from_pretrained
    model, report = load(tmp_path / "ours", num_labels=4, output_loading_info=True)
    assert set(report["missing_keys"]) == {"model.head.weight", "model.head.bias"}
    assert not report["unexpected_keys"]
    assert not {name for name in model.config.to_dict() if name.startswith(("decoder_", "mask_"))}
    example = images.images("crate_mae_encoder")
    features = model.eval().model.forward_features(example)
    torch.testing.assert_close(features, whole.forward_features(example), rtol=0, atol=0)
    model.save_pretrained(tmp_path / "theirs")
    again = models.from_pretrained(tmp_path / "theirs").eval()
    assert isinstance(again, models.CRATEMAEEncoder)
    torch.testing.assert_close(again(example), model(example).logits, rtol=0, atol=0)


def test_an_untied_head_is_kept(tmp_path):
    ours = families.drawn(families.build("crate_lm", tie_word_embeddings=False)).eval()
    expected = ours(language.prompts())[0]
    assert not torch.equal(ours.lm_head.weight, ours.transformer["wte"].weight)
    ours.save_pretrained(tmp_path / "ours")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert model.lm_head.weight is not model.transformer.wte.weight
    torch.testing.assert_close(model(language.prompts()).logits, expected, rtol=0, atol=0)
    model.save_pretrained(tmp_path / "theirs")
    torch.testing.assert_close(models.from_pretrained(tmp_path / "theirs").eval()(language.prompts())[0], expected)


def test_half_precision_and_a_device_map(tmp_path):
    _, model = language.pair("tost_lm")
    model.save_pretrained(tmp_path)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, device_map="cpu")
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert half.lm_head.weight is half.transformer.wte.weight
    language.greedy(half, language.prompts())


@pytest.mark.filterwarnings(
    "ignore:You are calling .generate"
)  # transformers 5.17: the prompt is not on the meta device
def test_weights_may_wait_on_the_cpu_or_the_disk(tmp_path):
    """Weights that are loaded for each call are nowhere between calls: caches are made where blocks run."""
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate: the extra hf")
    for family in ("crate_lm", "tost_lm"):
        ours, _ = language.pair(family)
        expected = ours.generate(language.prompts(), 4, temperature=0)
        model = accelerate.cpu_offload(language.wrapped(ours, family), torch.device("cpu"))
        assert next(model.parameters()).is_meta
        assert torch.equal(language.greedy(model, language.prompts(), 4), expected)
    for family in images.CONFIGS:
        ours, _ = images.pair(family)
        model = accelerate.cpu_offload(images.wrapped(ours, family), torch.device("cpu"))
        with torch.no_grad():
            torch.testing.assert_close(model(images.images(family)).logits, ours(images.images(family)))


FP8 = {"quant_method": "fp8"}
QUANTIZED = {
    "argument": lambda folder, model: AutoModelForCausalLM.from_pretrained(folder, quantization_config=dict(FP8)),
    "own class": lambda folder, model: type(model).from_pretrained(folder, quantization_config=dict(FP8)),
    "config": lambda folder, model: type(model)(
        type(model.config)(**model.config.to_dict(), quantization_config=dict(FP8))
    ),
}


@pytest.mark.parametrize("build", QUANTIZED.values(), ids=QUANTIZED)
def test_quantization_is_refused(build, tmp_path):
    """Several methods of transformers would leave every layer as it is, in silence."""
    _, model = language.pair("crate_lm")
    model.save_pretrained(tmp_path)
    with pytest.raises(NotImplementedError, match="CRATELMForCausalLM: quantization_config cannot be given"):
        build(tmp_path, model)


BROKEN = {
    "no-shard": (lambda f, index: (f / sorted(set(index["weight_map"].values()))[0]).unlink(), FileNotFoundError,
                 r"must hold model-00001-of-\d+.safetensors, which model.safetensors.index.json names"),
    "no-map": (lambda f, index: (f / "model.safetensors.index.json").write_text("{}"), ValueError,
               r"model.safetensors.index.json must have a weight_map"),
    "elsewhere": (
        lambda f, index: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../a.safetensors"}}'),
        ValueError, r"weight_map must name safetensors files of the folder, got '\.\./a\.safetensors'"),
}  # fmt: skip


@pytest.mark.parametrize(("corrupt", "error", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_shards(corrupt, error, message, tmp_path):
    language.pair("crate_lm")[1].save_pretrained(tmp_path, max_shard_size="8KB")
    corrupt(tmp_path, json.loads((tmp_path / "model.safetensors.index.json").read_text()))
    with pytest.raises(error, match=message):
        models.from_pretrained(tmp_path)


def test_transformers_does_not_leave_the_folder_either(tmp_path):
    """Nor does it unpickle: weights that torch.save wrote are not looked for."""
    pair = language.pair("crate_lm")[1]
    pair.save_pretrained(tmp_path / "model", max_shard_size="8KB")
    index = tmp_path / "model" / "model.safetensors.index.json"
    sound = json.loads(index.read_text())
    corrupted = {name: f"../model/{shard}" for name, shard in sound["weight_map"].items()}
    index.write_text(json.dumps({**sound, "weight_map": corrupted}))
    with pytest.raises(ValueError, match="weight_map must name safetensors files of the folder"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    index.write_text(json.dumps(sound))
    shard = tmp_path / "model" / sorted(sound["weight_map"].values())[0]
    shard.rename(tmp_path / "elsewhere.safetensors")
    shard.symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(ValueError, match=r"must be in its folder, is a link to .*elsewhere\.safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for path in (tmp_path / "model").glob("*.safetensors*"):
        path.unlink()
    torch.save(pair.state_dict(), tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "model")


@pytest.mark.parametrize("family", ["crate_lm", "tost"])
def test_a_card_says_how_to_load_the_model(family, tmp_path):
    pair, auto, _ = FAMILIES[family]
    _, model = pair(family)
    model.save_pretrained(tmp_path)
    path = card(tmp_path, license="mit")
    text = path.read_text()
    assert path == tmp_path / "README.md"
    assert text.startswith("---\nlibrary_name: transformers\nlicense: mit\n")
    assert f"{auto.__name__}.from_pretrained" in text
    code = text.split("```python\n")[1].split("```")[0].replace("<this repository>", str(tmp_path))
    exec(code, {})
    with pytest.raises(FileExistsError, match=r"card: README.md must not exist"):
        card(tmp_path, license="mit")


def test_a_push_keeps_the_card_that_was_uploaded(tmp_path, monkeypatch):
    """Nothing is sent: the hub is one that has our card, and takes what transformers sends."""
    _, model = language.pair("crate_lm")
    model.save_pretrained(tmp_path)
    path, sent = card(tmp_path, license="mit"), {}

    class Hub:
        def create_repo(self, repo_id, **options):
            return SimpleNamespace(repo_id=repo_id)

        def create_commit(self, repo_id, operations, **options):
            sent.update({each.path_in_repo: Path(each.path_or_fileobj).read_bytes() for each in operations})

    monkeypatch.setattr("transformers.utils.hub.hf_api", Hub)
    loaded = ModelCard.load(path)
    monkeypatch.setattr("transformers.utils.hub.ModelCard.load", lambda *args, **options: loaded)
    model.push_to_hub("user/model", tags=model.model_tags)
    assert set(sent) == {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    pushed = ModelCard(sent["README.md"].decode())
    assert pushed.data.to_dict() == loaded.data.to_dict()
    assert (pushed.data.license, pushed.data.pipeline_tag) == ("mit", "text-generation")
    assert "crate_kernels" in pushed.data.tags
    assert sent["config.json"] == (tmp_path / "config.json").read_bytes()


@pytest.mark.exhaustive
def test_eight_processes_load_one_folder(tmp_path):
    """Named as torchrun names them; every one has the weights that were saved."""
    _, model = language.pair("crate_lm")
    model.save_pretrained(tmp_path / "model", max_shard_size="8KB")
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-m", "tests.integrations.loaded", tmp_path], check=True, cwd=root)
    total = sum(p.double().sum().item() for p in model.parameters())
    for rank in range(8):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == [total] * 2


def test_nothing_of_ours_needs_remote_code(tmp_path):
    _, model = language.pair("crate_lm")
    model.save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    assert "auto_map" not in text
    assert AutoConfig.from_pretrained(tmp_path).model_type == "CRATELM"


def test_links_in_a_subfolder_are_refused(tmp_path):
    place = tmp_path / "model" / "inner"
    language.pair("crate_lm")[1].save_pretrained(place)
    (place / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    (place / "model.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(ValueError, match="must be in its folder, is a link to"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "model", subfolder="inner")
