"""Links of the pages lead somewhere, every public name is in the reference, and pictures say what made them."""

import re
from collections import Counter
from pathlib import PurePosixPath
from types import ModuleType
from urllib.parse import urlsplit

import pytest

import crate_kernels
from crate_kernels import models
from crate_kernels.experiments import EXPERIMENTS
from tests.docs import pages

REFERENCE = (pages.DOCS / "api.rst").read_text()
LINKING = [*pages.PAGES, pages.ROOT / "CHANGELOG.md"]
HOSTS = {
    "arxiv.org",
    "github.com",
    "huggingface.co",
    "keepachangelog.com",
    "semver.org",
}  # a new one is looked at by a person
FIGURES = sorted((pages.DOCS / "figures").iterdir())
LARGEST = 60_000  # bytes of a picture


@pytest.mark.parametrize("name", crate_kernels.__all__)
def test_every_public_name_is_in_the_reference(name):
    directives = set(re.findall(r"^\.\. auto(\w+):: ([\w.]+)$", REFERENCE, re.MULTILINE))
    thing = getattr(crate_kernels, name)
    if isinstance(thing, ModuleType):
        assert ("module", f"crate_kernels.{name}") in directives  # the directive lists all members
    else:
        assert ("class" if isinstance(thing, type) else "function", name) in directives


@pytest.mark.parametrize("package", [models.aot, models.redunet], ids=["aot", "redunet"])
def test_packages_of_models_are_in_the_reference(package):
    assert f".. automodule:: {package.__name__}\n   :members:" in REFERENCE


def slugs(page):
    """Return the anchors of a page's headings, as GitHub and Sphinx (``myst_heading_anchors``) make them."""
    titles = re.findall(r"^#{1,3} (.+)$", pages.prose(page), re.MULTILINE)
    found = [re.sub(r"[^\w\- ]", "", title.lower().strip()).replace(" ", "-") for title in titles]
    assert max(Counter(found).values(), default=0) <= 1, "two headings with one anchor"
    return set(found)


def targets(page):
    """Return what the links and pictures of a page lead to."""
    spoken = re.sub(r"`[^`]*`", "", pages.prose(page))  # code may read like a link
    return re.findall(r"\]\(([^)]*)\)", spoken)


@pytest.mark.parametrize("page", LINKING, ids=pages.name)
def test_links_lead_somewhere(page):
    for target in targets(page):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            there = (page.parent / path).resolve() if path else page
            assert there.is_file(), target
            assert there.is_relative_to(pages.ROOT), target
            assert not anchor or anchor in slugs(there), target
            # Sphinx has the pages of docs/ alone.
            assert pages.DOCS not in page.parents or pages.DOCS in there.parents or there.suffix == ".png", target


@pytest.mark.parametrize("page", LINKING, ids=pages.name)
def test_addresses_are_well_formed(page):
    for address in re.findall(r"\w+://[^\s)>\"'`]+", page.read_text()):
        parts = urlsplit(address)
        assert parts.scheme == "https", address
        assert parts.netloc in HOSTS, address
        assert re.fullmatch(r"(/[\w.-]+)*/?", parts.path), address


def test_every_page_is_in_the_table_of_contents_once():
    contents = re.findall(r"```\{toctree\}(.*?)```", (pages.DOCS / "index.md").read_text(), re.DOTALL)
    listed = [line for group in contents for line in group.split("\n") if line and not line.startswith(":")]
    every = [path for folder in (pages.DOCS, pages.DOCS / "tutorials") for path in folder.iterdir()]
    named = {
        str(PurePosixPath(path.relative_to(pages.DOCS)).with_suffix(""))
        for path in every
        if path.suffix in (".md", ".rst")
    }
    assert sorted(listed) == sorted(named - {"index"})


@pytest.mark.parametrize("page", LINKING, ids=pages.name)
def test_headings_have_anchors_of_their_own(page):
    if page.name != "CHANGELOG.md":
        slugs(page)


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.stem)
def test_a_figure_is_small_and_the_gallery_says_what_made_it(figure):
    image = pytest.importorskip("PIL.Image", reason="needs pillow: pip install pillow")
    subcommand, _, drawn = figure.stem.partition("-")
    job = pages.ROOT / "crate_kernels" / "experiments" / subcommand
    assert any(f'"{drawn}"' in path.read_text() for path in job.glob("*.py")), "no experiment draws it"
    assert figure.stat().st_size < LARGEST
    gallery = (pages.DOCS / "gallery.md").read_text()
    below = gallery.partition(f"](figures/{figure.name})")[2].partition("![")[0]
    with image.open(figure) as picture:
        assert f"`{picture.text['command']}`" in below


def test_the_pages_name_every_experiment():
    subcommands = {each.name for each in EXPERIMENTS}
    table = set(re.findall(r"^\| `(\w+)` \|", (pages.DOCS / "experiments.md").read_text(), re.MULTILINE))
    assert table == subcommands - {"demo"}
    for page in (pages.ROOT / "README.md", pages.DOCS / "gallery.md"):
        assert subcommands - {"demo"} <= set(pages.inline(page)), page


LINES = {"README.md": 130, "CHANGELOG.md": 60, "docs/mssa.md": 100, "docs/tssa.md": 100, "docs/ista.md": 100}


@pytest.mark.parametrize("page", LINES)
def test_pages_that_are_read_first_stay_short(page):
    assert len((pages.ROOT / page).read_text().splitlines()) <= LINES[page]
