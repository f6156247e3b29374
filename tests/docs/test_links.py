"""The pages of docs/: every public name is in the reference, and links lead somewhere."""

import re
from pathlib import Path
from types import ModuleType

import pytest

import crate_kernels
from crate_kernels import models

ROOT = Path(__file__).parents[1]
REFERENCE = (ROOT / "docs" / "api.rst").read_text()
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "tutorials").glob("*.md")),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
]


@pytest.mark.parametrize("name", crate_kernels.__all__)
def test_every_public_name_is_in_the_reference(name):
    directives = set(re.findall(r"^\.\. auto(\w+):: ([\w.]+)$", REFERENCE, re.MULTILINE))
    thing = getattr(crate_kernels, name)
    if isinstance(thing, ModuleType):
        assert ("module", f"crate_kernels.{name}") in directives  # the directive lists all members
    else:
        assert ("class" if isinstance(thing, type) else "function", name) in directives


@pytest.mark.parametrize("room", [models.aot, models.redunet], ids=["aot", "redunet"])
def test_rooms_of_models_are_in_the_reference(room):
    assert f".. automodule:: {room.__name__}\n   :members:" in REFERENCE


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_to_files(page):
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)  # code may read like a link
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose):
        assert target.startswith("https://") or (page.parent / target).is_file(), target


def test_every_page_is_in_the_table_of_contents():
    contents = re.search(r"```\{toctree\}(.*?)```", (ROOT / "docs" / "index.md").read_text(), re.DOTALL)
    assert contents is not None
    folder = ROOT / "docs"
    pages = {
        str(path.relative_to(folder).with_suffix(""))
        for path in (*folder.iterdir(), *(folder / "tutorials").iterdir())
        if path.suffix in (".md", ".rst")
    }
    assert pages - {"index"} == {line for line in contents[1].split() if not line.startswith(":")}
