"""The kernels that the page names are where it says, and imports go down as it lists them."""

import re

import pytest

from tests import test_house
from tests.docs import pages

TEXT = (pages.DOCS / "architecture.md").read_text()
ROWS = re.findall(r"^\| [^|]+ \| [^|]+ \| `([\w/.]+)` \| `(\w+)` \|$", TEXT, re.MULTILINE)


@pytest.mark.parametrize(("path", "name"), ROWS)
def test_a_kernel_is_in_its_file(path, name):
    ahead = r"(def |void |void [^;{\n]* |__launch_bounds__\([^;{]*\)\s+)"
    assert re.search(rf"{ahead}{name}\(", (pages.ROOT / path).read_text())


def test_every_file_with_a_kernel_has_a_row():
    sources = [*pages.ROOT.glob("csrc/*/cuda/*.cuh"), *pages.ROOT.glob("crate_kernels/ops/**/*.py")]
    kernels = re.compile(r"__global__ |^@triton\.jit.*\ndef _\w+_kernel\(", re.MULTILINE)
    files = {str(path.relative_to(pages.ROOT)) for path in sources if kernels.search(path.read_text())}
    assert len(files) > 30
    assert files - {path for path, _ in ROWS} == set()


@pytest.mark.parametrize("top", ["csrc/common/cpu/isa/mssa_avx512.cpp", "csrc/mssa/cuda/mma_forward.cuh"])
def test_headers_include_what_the_diagram_says(top):
    diagram = next(block.text for block in pages.blocks(pages.DOCS / "architecture.md", "text") if top in block.text)
    diagram = diagram.partition("\n\n")[0]
    named = set(re.findall(r"(\w+\.(?:cuh|h))\b", diagram)) - {top.rpartition("/")[2]}
    assert len(named) > 5
    assert named <= {path.name for path in included(pages.ROOT / top)}


def included(path):
    """Return every header of ours that a file includes, directly or not."""
    found, todo = set(), [path]
    while todo:
        now = todo.pop()
        for name in re.findall(r'^\s*#\s*include "([^"]+)"', now.read_text(), re.MULTILINE):
            header = (now.parent / name).resolve()
            if header.is_file() and header not in found:
                found.add(header)
                todo.append(header)
    return found


def test_the_floors_are_those_that_the_house_holds():
    listed = TEXT.partition("Imports point down only: ")[2].partition(".\n")[0].split("then")
    floors = [set(re.findall(r"`(\w+)`", part)) for part in listed]
    wanted = [set(packages) for packages in test_house.FLOORS]
    top = [{"cli"}, {"experiments"}, {"bench"}, {"testing"}]
    assert wanted[: len(top)] == top
    assert floors[0] == set.union(*top)
    assert [floor for floor in floors[1:] if floor] == wanted[len(top) + 1 :]
