"""transformers' own FSDP: plans that name our modules, and the numbers of one process."""

import json

import pytest
import torch.multiprocessing
from torch import nn

pytest.importorskip("transformers", reason="needs transformers: the extra hf")
pytest.importorskip("transformers.distributed.mixin", reason="needs transformers 5.24, which shards by a plan")
from transformers.distributed import DistributedConfig, mixin

from tests.integrations import images, language, sharded

MODELS = {**dict.fromkeys(language.CONFIGS, language), **dict.fromkeys(images.CONFIGS, images)}
LISTS = {"tost": ("blocks", "cls_attn_blocks"), "aot_vision": ("layers",), "crate_mae_encoder": ("blocks",)}


@pytest.fixture
def resolved(monkeypatch):
    """What the plan of a model wraps; transformers warns of a rule that names nothing."""

    def resolve(model):
        warned = []
        monkeypatch.setattr(mixin.logger, "warning", warned.append)
        _, _, plan = model._resolve_parallel_plans(DistributedConfig(fsdp_size=2))
        assert not warned
        return plan

    return resolve


@pytest.mark.parametrize("family", MODELS)
def test_the_plan_wraps_every_block(family, resolved):
    _, model = MODELS[family].pair(family)
    plan = resolved(model)
    if MODELS[family] is language:
        wanted = {"transformer.h.0", "transformer.h.1", "transformer.wte"}
        wanted |= {"transformer.ln_f"} if hasattr(model.transformer, "ln_f") else set()
    else:
        lists = LISTS.get(family, ("transformer.layers",))
        wanted = {f"model.{name}.{i}" for name in lists for i in range(len(model.model.get_submodule(name)))}
    assert plan.keys() == wanted
    assert all(isinstance(model.get_submodule(name), nn.Module) for name in plan)


def test_a_head_of_its_own_is_wrapped_too(resolved):
    ours = language.families.build("tost_lm", tie_word_embeddings=False)
    plan = resolved(language.wrapped(ours, "tost_lm"))
    assert {"lm_head", "transformer.wte"} < plan.keys()
    assert (plan["lm_head"], plan["transformer.h.0"]) == ("keep_full_weight", "free_full_weight")


def test_a_base_is_wrapped_by_its_own_names(resolved):
    _, model = language.pair("tost_lm")
    assert resolved(model.transformer).keys() == {"wte", "h.0", "h.1", "ln_f"}


@pytest.mark.exhaustive  # starting the processes takes a quarter of a minute
def test_two_processes_are_one(tmp_path):
    families = ["crate_lm", "tost_lm", "aot_mhsa_lm", "crate", "tost"]
    for family in families:
        MODELS[family].pair(family)[1].save_pretrained(tmp_path / family)
    torch.multiprocessing.spawn(sharded.run, (tmp_path, families), sharded.RANKS)
    failed = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(sharded.RANKS)]
    told = [f"process {rank}, {name}:\n{text}" for rank, each in enumerate(failed) for name, text in each.items()]
    assert not told, "\n".join(told)
