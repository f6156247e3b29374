"""Folders and weights of every family: saved, read back, corrupted, published."""

import json
from dataclasses import asdict
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from crate_kernels import models
from tests.models.families import FAMILIES, build, drawn, inputs, output
from tests.models.test_every_model import DROPOUT


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_gives_the_same_model_back(family, tmp_path):
    model = drawn(build(family, **DROPOUT[family], backend="reference")).eval()
    folder = tmp_path / "deep" / "er"
    assert model.save_pretrained(folder) == folder
    prepared = ["preprocessor_config.json"] if hasattr(model, "layout") else []  # for pictures
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", *prepared]
    assert "backend" not in json.loads((folder / "config.json").read_text())
    for again in (type(model).from_pretrained(folder), models.from_pretrained(str(folder), backend="composite")):
        assert type(again) is type(model)
        assert again.state_dict().keys() == model.state_dict().keys()
        assert all(torch.equal(t, model.state_dict()[name]) for name, t in again.state_dict().items())
        for name in DROPOUT[family]:
            assert getattr(again.config, name) == 0.2
    assert again.config.backend == "composite"
    assert type(model).from_pretrained(folder).config.backend is None
    again.eval()
    torch.testing.assert_close(output(family, again(*inputs(family))), output(family, model(*inputs(family))))
    model.save_pretrained(folder)  # replaces


def test_a_tied_head_is_saved_once(tmp_path):
    build("crate_lm").save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = list(file.keys())
    assert "transformer.wte.weight" in names
    assert "lm_head.weight" not in names
    again: Any = models.from_pretrained(tmp_path)
    assert again.lm_head.weight is again.transformer["wte"].weight


def corrupt(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    config = {name: value for name, value in {**config, **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))


def cut(folder, size):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])


FOLDERS = {
    "not-json": (lambda f: (f / "config.json").write_text("{"), ValueError, r"config.json must be JSON"),
    "no-type": (lambda f: corrupt(f, model_type=...), ValueError, "must be an object with a 'model_type'"),
    "other-type": (
        lambda f: corrupt(f, model_type="ViT"),
        ValueError,
        "model_type must be one of CRATE, .*, got 'ViT'",
    ),
    "unknown-field": (lambda f: corrupt(f, mlp=4), ValueError, "config.json: arguments must be among .*; got mlp"),
    "lacking-field": (lambda f: corrupt(f, depth=...), ValueError, "config.json: config must give depth"),
    "bad-field": (lambda f: corrupt(f, depth=0), ValueError, r"config.json: CRATE: depth must be >= 1, got 0"),
    "text-field": (lambda f: corrupt(f, depth="2"), TypeError, r"config.json: CRATE: depth must be an int, got str"),
    "null-field": (
        lambda f: corrupt(f, ista=None),
        TypeError,
        r"config.json: CRATE: ista must be a number, got NoneTy",
    ),
    "cut-header": (lambda f: cut(f, 40), ValueError, r"from_pretrained: .*model.safetensors must be a whole safetenso"),
    "cut-data": (lambda f: cut(f, -4), ValueError, r"from_pretrained: .*model.safetensors must be a whole safetensors"),
    "empty": (lambda f: cut(f, 0), ValueError, r"from_pretrained: .*model.safetensors must be a whole safetensors fil"),
    "other-shape": (
        lambda f: corrupt(f, num_classes=7),
        ValueError,
        "from_pretrained: .*: state_dict does not fit the CRATE",
    ),
    "no-config": (lambda f: (f / "config.json").unlink(), FileNotFoundError, "config.json"),
    "no-weights": (lambda f: (f / "model.safetensors").unlink(), FileNotFoundError, "must hold model.safetensors"),
}


@pytest.mark.parametrize(("damage", "error", "message"), FOLDERS.values(), ids=FOLDERS)
def test_a_corrupted_folder(damage, error, message, tmp_path):
    build("crate").save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(error, match=message):
        models.from_pretrained(tmp_path)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"folder must be one that is there and holds config.json, got .*name"):
        models.from_pretrained(tmp_path / "name")
    (tmp_path / "file").touch()
    with pytest.raises(FileNotFoundError, match=r"from_pretrained: folder must be one .*, got .*file"):
        FAMILIES["crate"][0].from_pretrained(tmp_path / "file")


def test_no_path_for_a_folder():
    for load in (models.from_pretrained, FAMILIES["crate"][0].from_pretrained):
        with pytest.raises(TypeError, match="from_pretrained: folder must be a path, got NoneType"):
            load(None)
    with pytest.raises(TypeError, match="save_pretrained: folder must be a path, got int"):
        build("crate").save_pretrained(3)


def test_a_folder_with_an_override_that_cannot_be(tmp_path):
    build("crate").save_pretrained(tmp_path)
    with pytest.raises(TypeError, match=r"with backend given: CRATE: backend must be None or a string, got int"):
        models.from_pretrained(tmp_path, backend=5)


def test_a_folder_of_another_class(tmp_path):
    build("crate").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"config.json must be of a CRATEAlpha, got CRATE"):
        FAMILIES["crate_alpha"][0].from_pretrained(tmp_path)


def test_an_interrupted_save_leaves_what_was_there(tmp_path, monkeypatch):
    model = build("crate")
    model.save_pretrained(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        drawn(model).save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 3


def test_weights_passed_for_saving_are_the_models_own(tmp_path):
    model, other = build("crate_lm"), drawn(build("crate_lm"))
    model.save_pretrained(tmp_path, state_dict=other.state_dict())
    again = models.from_pretrained(tmp_path)
    assert all(torch.equal(t, other.state_dict()[name]) for name, t in again.state_dict().items())
    short = {name: t for name, t in other.state_dict().items() if "wpe" not in name}
    with pytest.raises(
        ValueError, match=r"save_pretrained: state_dict does not fit the CRATELM .*\n  missing trans.*wpe"
    ):
        model.save_pretrained(tmp_path, state_dict=short)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_weights_are_numbers_of_the_models_kind(dtype, tmp_path):
    model = build("crate")
    state = {**model.state_dict(), "cls_token": model.state_dict()["cls_token"].to(dtype)}
    message = f"cls_token must have a floating dtype, got {dtype}"
    config = {name: value for name, value in asdict(model.config).items() if name != "backend"}
    with pytest.raises(ValueError, match=message):
        models.from_official("crate", state, config)
    model.save_pretrained(tmp_path)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        models.from_pretrained(tmp_path)


def test_weights_of_another_precision_and_a_count_of_another_kind_are_read():
    """``{k: v.half() for ...}`` turns the stem's count of batches into a float, too."""
    source = drawn(build("tost"))
    state = {name: tensor.half() for name, tensor in source.state_dict().items()}
    config = {name: value for name, value in asdict(source.config).items() if name != "backend"}
    model = models.from_official("tost_vision", state, config)
    assert all(torch.equal(t.half(), state[name]) for name, t in model.state_dict().items())


def test_no_published_class_no_published_weights():
    with pytest.raises(ValueError, match=r"to_official: model must be of crate, .*, got AoTVision"):
        models.to_official(build("aot_vision"))


@pytest.mark.parametrize("family", ["crate", "crate_alpha", "crate_mae", "tost", "crate_lm_overcomplete", "tost_lm"])
def test_official_weights_are_the_models(family):
    model = build(family)
    assert models.to_official(model).keys() == model.state_dict().keys()
