"""Sound model folders and a sound checkpoint, small: what is mutated."""

import json
import shutil

from safetensors.torch import load_file, save_file

from crate_kernels.experiments.common import fit
from tests.loaders.training import training
from tests.models.families import build

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
FAMILIES = ("crate", "crate_lm", "crate_lm_overcomplete", "tost", "crate_mae_encoder", "crate_mae", "aot_vision")


def write(root):
    """Write every folder below ``root``; return their paths, the checkpoint's last."""
    folders = []
    for family in FAMILIES:
        build(family).save_pretrained(root / family)
        folders.append(root / family)
    folders += [_sharded(root / "crate", root / "sharded"), _as_by_transformers(root / "tost", root / "others")]
    (root / "checkpoint").mkdir()
    trained = training()
    for _ in range(2):
        trained.step()
    fit.save(trained, root / "checkpoint")
    return [*folders, root / "checkpoint"]


def _sharded(whole, folder):
    shutil.copytree(whole, folder)
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    place = {name: SHARDS[number % 2] for number, name in enumerate(sorted(state))}
    for shard in SHARDS:
        save_file({name: state[name] for name in state if place[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    return folder


def _as_by_transformers(whole, folder):
    shutil.copytree(whole, folder)
    config = json.loads((folder / "config.json").read_text())
    others = {"transformers_version": "5.17.0", "torch_dtype": "float32", "id2label": {"0": "a"}}
    (folder / "config.json").write_text(json.dumps({**config, **others}))
    return folder
