"""transformers' own FSDP: plans that name our modules, and the numbers of one process."""

import json
import re

import pytest

pytest.importorskip("transformers", reason="needs transformers: the extra hf")

from tests.integrations import images, language, sharded
from tests.tools import processes

MODELS = {**dict.fromkeys(language.CONFIGS, language), **dict.fromkeys(images.CONFIGS, images)}
LISTS = {"tost": ("blocks", "cls_attn_blocks"), "aot_vision": ("layers",), "crate_mae_encoder": ("blocks",)}


def wrapped(model):
    """Names of the modules that the plan of a model wraps; numbers are ``*`` in rules, and each names something."""
    plan, names = model.fsdp_plan, {name: re.sub(r"\.\d+(?=\.|$)", ".*", name) for name, _ in model.named_modules()}
    assert plan.keys() <= set(names.values())
    return {name for name, rule in names.items() if rule in plan}


@pytest.mark.parametrize("family", MODELS)
def test_the_plan_wraps_every_block(family):
    _, model = MODELS[family].pair(family)
    if MODELS[family] is language:
        wanted = {"transformer.h.0", "transformer.h.1", "transformer.wte", "lm_head"}
        wanted |= {"transformer.ln_f"} if hasattr(model.transformer, "ln_f") else set()
    else:
        lists = LISTS.get(family, ("transformer.layers",))
        wanted = {f"model.{name}.{i}" for name in lists for i in range(len(model.model.get_submodule(name)))}
    assert wrapped(model) == wanted


def test_a_base_is_wrapped_by_its_own_names():
    _, model = language.pair("tost_lm")
    assert wrapped(model.transformer) == {"wte", "h.0", "h.1", "ln_f"}


@pytest.mark.exhaustive  # starting the processes takes a quarter of a minute
def test_two_processes_are_one(tmp_path):
    families = ["crate_lm", "tost_lm", "aot_mhsa_lm", "crate", "tost"]
    for family in families:
        MODELS[family].pair(family)[1].save_pretrained(tmp_path / family)
    processes.spawn(sharded.run, (tmp_path, families), sharded.RANKS)
    failed = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(sharded.RANKS)]
    report = [f"process {rank}, {name}:\n{text}" for rank, each in enumerate(failed) for name, text in each.items()]
    assert not report, "\n".join(report)
