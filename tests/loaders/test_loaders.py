"""Mutated model folders and checkpoints are refused, by a message that names the file, or load; and the named cases."""

import json
import os
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from crate_kernels import models
from crate_kernels.experiments.common import fit
from tests.loaders import folders
from tests.loaders.judge import judge
from tests.loaders.training import training
from tests.models.families import build


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return folders.write(tmp_path_factory.mktemp("sound"))


@pytest.mark.parametrize("start", [0, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (40, 80, 120))])
def test_mutated_folders(start, sound, tmp_path):
    verdicts = {seed: judge(seed, sound, tmp_path) for seed in range(start, start + 40)}
    assert not {seed: verdict.why for seed, verdict in verdicts.items() if verdict.status == "failed"}


def test_sound_folders_load(sound):
    for folder in sound[:-1]:
        assert models.from_pretrained(folder).config is not None
    resumed = training()
    assert fit.resume(resumed, sound[-1])
    assert resumed.done == 2


def config(**changes):
    """Return a function that changes fields of a folder's config."""

    def corrupt(folder):
        found = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**found, **changes}))

    return corrupt


def text(content):
    return lambda folder: (folder / "config.json").write_text(content)


def outside(name):
    """Return a function that puts a link out of the folder in the place of a file."""

    def corrupt(folder):
        shutil.move(folder / name, folder.parent / "elsewhere")
        (folder / name).symlink_to(folder.parent / "elsewhere")

    return corrupt


def pipe(name):
    def corrupt(folder):
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return corrupt


def circle(folder):
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("config.json")


def index(content):
    """Return a function that makes a folder's weights one shard, which the index names so."""

    def corrupt(folder):
        (folder / "model.safetensors").rename(folder / "one.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))

    return corrupt


def header(change):
    def corrupt(folder):
        path = folder / "model.safetensors"
        content = path.read_bytes()
        size = int.from_bytes(content[:8], "little")
        new = change(content[8 : 8 + size])
        path.write_bytes(struct.pack("<Q", len(new)) + new + content[8 + size :])

    return corrupt


def two_shards(folder):
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file(state, folder / "a.safetensors")
    save_file({"norm.weight": torch.ones(1)} if "norm.weight" in state else state, folder / "b.safetensors")
    places = {name: f"{'ab'[number % 2]}.safetensors" for number, name in enumerate(state)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


EMPTY = b'{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
FOLDERS = {
    "config-out-of-the-folder": (outside("config.json"), r"config.json must be in its folder, is a link to .*els"),
    "weights-out-of-the-folder": (outside("model.safetensors"), r"model.safetensors must be in its folder, is a link"),
    "config-a-circle": (circle, r"config.json cannot be followed|config.json must be a regular file"),
    "config-a-pipe": (pipe("config.json"), "config.json must be a regular file"),
    "weights-a-pipe": (pipe("model.safetensors"), "model.safetensors must be a regular file"),
    "shard-above": (index({"weight_map": {"a": "../x"}}), r"must name safetensors files of the folder, got '\.\./x"),
    "shard-absolute": (index({"weight_map": {"a": "/etc/passwd"}}), "must name safetensors files of the folder"),
    "shard-the-parent": (index({"weight_map": {"a": ".."}}), r"must name safetensors files of the folder, got '\.\."),
    "shard-of-a-long-name": (
        index({"weight_map": {"a": "x" * 5000 + ".safetensors"}}), "must name safetensors files of the folder, got 'xxx"
    ),
    "shard-a-number": (index({"weight_map": {"a": 1}}), "must have a weight_map from names to names of files"),
    "shards-a-list": (index({"weight_map": ["one.safetensors"]}), "must have a weight_map from names to names"),
    "tensor-in-two-shards": (two_shards, r"b.safetensors must not have .*, which another file has too"),
    "deep-config": (text("[" * 10**5 + "]" * 10**5), "config.json must be JSON, nested less deeply"),
    "large-config": (text("{}" + " " * (1 << 20)), "config.json must have at most 1048576 bytes, got 1048578"),
    "key-twice": (text('{"model_type": "CRATE", "model_type": "CRATE"}'), "config.json must be JSON, 'model_type' is"),
    "nan": (text('{"model_type": "CRATE", "ista": NaN}'), "config.json must be JSON, NaN is no JSON number"),
    "list": (text("[1]"), "config.json must hold a JSON object, got list"),
    "huge-width": (config(dim_head=10**8), r"state_dict does not fit the CRATE of this config:(.|\n)*300000000"),
    "huge-depth": (config(depth=10**9), "config.json: the config has more layers than the weights"),
    "no-width-at-all": (config(dim_head=10**30), r"config.json: CRATE: dim_head must be below 2\*\*63, got 1000"),
    "large-header": (header(lambda text: text + b" " * (8 << 20)), "got a header of 8\\d+ bytes, of at most 8388608"),
    "tensor-twice": (header(lambda text: b'{"x":%s,"x":%s,' % (EMPTY, EMPTY) + text[1:]), "'x' is there twice"),
    "deep-header": (header(lambda text: b'{"__metadata__":' + b"[" * 10**5), "must be JSON, nested less deeply"),
    "dtype": (header(lambda text: text.replace(b'"F32"', b'"F8_E4M3"', 1)), "model.safetensors"),
}  # fmt: skip


@pytest.mark.parametrize(("corrupt", "message"), FOLDERS.values(), ids=FOLDERS)
def test_what_is_refused(corrupt, message, tmp_path):
    folder = build("crate").save_pretrained(tmp_path / "model")
    corrupt(folder)
    with pytest.raises(ValueError, match=f"from_pretrained: .*{message}"):
        models.from_pretrained(folder)


def test_a_snapshot_of_a_hubs_cache_has_links_to_its_blobs(tmp_path):
    """A link to what is beside the blobs is still refused."""
    folder = build("crate").save_pretrained(tmp_path / "models--a--b" / "snapshots" / "0123")
    (blobs := tmp_path / "models--a--b" / "blobs").mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).rename(blobs / name)
        (folder / name).symlink_to(f"../../blobs/{name}")
    assert isinstance(models.from_pretrained(folder), models.CRATE)
    (blobs / "config.json").rename(tmp_path / "models--a--b" / "config.json")
    (blobs / "config.json").symlink_to("../config.json")
    with pytest.raises(ValueError, match=r"config.json must be in its folder, is a link to .*models--a--b/config.json"):
        models.from_pretrained(folder)


def checkpoint(**changes):
    """Return a function that changes tensors of a checkpoint."""

    def corrupt(path):
        path.write_bytes(path.read_bytes())
        fitted = training()
        fit.resume(fitted, path.parent)
        state = load_file(path)
        state = {name: t for name, t in {**state, **changes}.items() if t is not ...}
        save_file(state, path, {"run": json.dumps(fitted.identity)})

    return corrupt


CHECKPOINTS = {
    "weights-of-another-shape": (
        checkpoint(**{"model.0.bias": torch.ones(5)}),
        r"(.|\n)*0.bias must be \(4,\), got \(5,\)",
    ),
    "moments-of-another-shape": (checkpoint(**{"optimizer.0.exp_avg": torch.ones(5)}), "0.exp_avg fits no parameter"),
    "moments-of-no-parameter": (checkpoint(**{"optimizer.99.exp_avg": torch.ones(1)}), "99.exp_avg fits no parameter"),
    "moments-of-no-shape": (checkpoint(**{"optimizer.4.step": torch.ones(4)}), "4.step fits no parameter"),
    "moments-incomplete": (checkpoint(**{"optimizer.1.exp_avg": ...}), "must have the same parts for all parameters"),
    "too-many-steps": (checkpoint(**{"history.losses": torch.ones(5)}), "history must be of at most 4 steps"),
    "no-number-of-a-step": (checkpoint(**{"history.watched": torch.full((1, 2), torch.nan)}), "NaN"),
    "pickled": (lambda path: torch.save({"run": 1}, path), "must be a whole safetensors file"),
}


@pytest.mark.parametrize(("corrupt", "message"), CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_a_checkpoint_that_does_not_fit(corrupt, message, sound, tmp_path):
    path = shutil.copytree(sound[-1], tmp_path / "checkpoint") / "small.checkpoint"
    corrupt(path)
    resumed = training()
    before = {name: tensor.clone() for name, tensor in resumed.model.state_dict().items()}
    with pytest.raises(fit.Unusable, match=f"small.checkpoint cannot be read .*{message}"):
        fit.resume(resumed, path.parent)
    assert all(torch.equal(tensor, before[name]) for name, tensor in resumed.model.state_dict().items())
