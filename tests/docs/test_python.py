"""Every Python block of every page runs, top to bottom; so does the code of docstrings."""

import ast
import re
import textwrap

import pytest
import torch

from crate_kernels import models
from tests.distributed import page_cases
from tests.docs import pages
from tests.integrations import vision_schemas  # noqa: F401 (torchvision can be imported)

LANGUAGES = {"python", "sh", "text", "{toctree}"}
ELSEWHERE = {"docs/distributed.md": page_cases}  # runs the page in two processes
NEEDS = {  # page -> packages that it is about
    "README.md": (),
    "docs/export.md": ("onnxscript", "onnxruntime"),
    "docs/faq.md": (),
    "docs/feature-maps.md": (),
    "docs/graphs.md": (),
    "docs/image-sizes.md": (),
    "docs/index.md": (),
    "docs/ista.md": (),
    "docs/models.md": (),
    "docs/moving.md": (),
    "docs/mssa.md": (),
    "docs/opacus.md": ("opacus",),
    "docs/support.md": (),
    "docs/timm.md": ("timm", "torchvision"),
    "docs/tools.md": (),
    "docs/tssa.md": (),
    "docs/transformers.md": ("transformers", "accelerate"),
    "docs/tutorials/block.md": (),
    "docs/tutorials/decode.md": (),
    "docs/tutorials/patch.md": (),
}
# A page that promises a test says enough for one.
MIN_ASSERTIONS = {"docs/timm.md": 10, "docs/transformers.md": 10, "docs/distributed.md": 1}
MIN_ASSERTIONS |= dict.fromkeys([page for page in NEEDS if "tutorials" in page], 4)
DOCSTRINGS = {"crate_kernels/models/_shared/base.py: save_pretrained"}


# PyTorch's exporter to ONNX warns, of itself, and so does opacus.
ALOUD = [pytest.mark.filterwarnings(f"ignore::{kind}Warning") for kind in ("Deprecation", "Future", "User")]
MARKS = dict.fromkeys(("docs/export.md", "docs/opacus.md"), ALOUD)


@pytest.mark.parametrize("page", [pytest.param(p, marks=MARKS.get(p, ())) for p in NEEDS])
def test_every_python_block_runs(page, tmp_path, monkeypatch):
    for package in NEEDS[page]:
        pytest.importorskip(package, reason=f"needs {package}")
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        # "A model you have" is that of the tutorial.
        names = {"model": theirs()} if page == "README.md" else {}
        pages.run(pages.ROOT / page, names)


def theirs():
    """Return the model of the tutorial on patch, as it is before it is patched."""
    first = pages.blocks(pages.DOCS / "tutorials" / "patch.md", "python")[0]
    namespace = {"__name__": "theirs"}
    exec(first.text, namespace)
    return namespace["model"]


def test_no_page_with_python_is_left_out():
    having = {pages.name(page) for page in pages.PAGES if pages.blocks(page, "python")}
    assert having == NEEDS.keys() | ELSEWHERE.keys()
    for page, runner in ELSEWHERE.items():
        assert pages.ROOT / page == runner.PAGE
        assert "torchrun" in pages.prose(runner.PAGE).partition("\n## ")[0]  # the page says what it needs


@pytest.mark.parametrize("page", pages.PAGES, ids=pages.name)
def test_no_block_escapes_by_its_language(page):
    for block in pages.blocks(page):
        assert block.language in LANGUAGES, block
        assert block.language != "text" or not is_code(block.text), block
    fences = re.findall(r"^\s*(?:```|~~~)", page.read_text(), re.MULTILINE)
    assert len(fences) == 2 * len(pages.blocks(page))


@pytest.mark.parametrize(("page", "minimum"), MIN_ASSERTIONS.items())
def test_pages_assert_what_they_claim(page, minimum):
    text = pages.program(pages.ROOT / page)
    assert len(re.findall(r"^(assert |torch\.testing\.assert_close)", text, re.MULTILINE)) >= minimum


def is_code(text):
    """Return whether a literal block is Python: equations do not compile."""
    try:
        return bool(ast.parse(textwrap.dedent(text)).body)
    except SyntaxError:
        return False


def documented():
    """Yield the code in every docstring of the package, and where it is."""
    for path in sorted((pages.ROOT / "crate_kernels").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                where = f"{pages.name(path)}: {getattr(node, 'name', '')}"
                assert ">>>" not in text, f"{where}: write it as an indented block after two colons"
                for literal in re.findall(r"::\n\n((?:[ \t]+.*\n?|\n)+)", text):
                    if is_code(literal):
                        yield where, textwrap.dedent(literal)


def test_code_in_docstrings_runs(tmp_path):
    found = dict(documented())
    assert found.keys() == DOCSTRINGS
    (code,) = found.values()
    model, folder = models.create("crate_tiny", dim=48, depth=1, heads=3, dim_head=16), tmp_path / "model"
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        exec(code, {"model": model, "folder": folder, "torch": torch})
    finally:
        torch.distributed.destroy_process_group()
    saved = models.from_pretrained(folder).state_dict()
    assert all(torch.equal(saved[key], weight) for key, weight in model.state_dict().items())
