"""The zoo's tables: every size is in them once, with its parameters, its input and its reader."""

import re

import pytest
import torch

from crate_kernels import models
from tests.docs import pages
from tests.models.test_sizes import COUNTED, DERIVED

PAGE = pages.DOCS / "models.md"
# Of texts the numbers there are without positions.
TESTED = {name: count for name, count in {**COUNTED, **DERIVED}.items() if "_lm_" not in name}
SECTIONS = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", PAGE.read_text(), re.MULTILINE))
ROWS = {
    name: (family, parameters, taken)
    for family, text in SECTIONS.items()
    for name, parameters, taken in re.findall(r"^\| `(\w+)` \| ([\d,]+) \| ([^|]+) \|", text, re.MULTILINE)
}
READERS = {
    family: set(re.findall(r"`(\w+)`", readers))
    for family, readers in re.findall(r"^\| \[([^\]]+)\]\(#.*\| ([^|]*) \|$", PAGE.read_text(), re.MULTILINE)
}


def test_every_size_is_in_one_table():
    listed = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(models.names())
    assert ROWS.keys() == set(listed)


@pytest.mark.parametrize("name", models.names())
def test_a_row_says_what_the_size_is(name):
    _, parameters, taken = ROWS[name]
    assert parameters == f"{TESTED.get(name) or counted(name):,}"
    assert taken == input_of(models._OWNERS[name].SIZES[name])


def counted(name):
    with torch.device("meta"):
        return sum(p.numel() for p in models.create(name).parameters())


def input_of(config):
    """Return what a model reads, in the page's words."""
    if hasattr(config, "patch_size"):
        side = config.img_size if hasattr(config, "img_size") else config.image_size
        return f"{side} px, patches of {config.patch_size}"
    if hasattr(config, "block_size"):
        return f"{config.block_size:,} tokens"
    if hasattr(config, "n_positions"):
        return f"{config.n_positions} positions"
    return f"{config.d} numbers" if hasattr(config, "d") else f"{config.channels} channels of {config.timesteps}"


@pytest.mark.parametrize("family", SECTIONS)
def test_the_readers_of_a_family_are_those_of_its_sizes(family):
    found = set()
    for name in (name for name, row in ROWS.items() if row[0] == family):
        try:
            found.add(models._published(name)[0])
        except ValueError:
            assert not READERS[family], f"{name} has no published checkpoint"
    assert found <= READERS[family]
    assert READERS[family] <= models._SYSTEMS.keys()


def test_every_reader_of_a_model_is_in_the_table():
    modules = {"tssa_attention", "tssa_causal_attention"}
    assert set().union(*READERS.values()) == models._SYSTEMS.keys() - modules
