"""Code within sentences: the names are there, and calls of them take the arguments."""

import ast
import importlib
import inspect
import re
from importlib.util import find_spec

import pytest
import torch

import crate_kernels
from crate_kernels import models
from tests.docs import pages

MODULES = {name: f"crate_kernels.{name}" for name in ("analysis", "distributed", "models", "testing")}
MODULES |= {"crate_kernels": "crate_kernels", "torch": "torch", "F": "torch.nn.functional"}
FUNCTIONS = {name for name in crate_kernels.__all__ if callable(getattr(crate_kernels, name))}
# `name`, `name` (what it is) and `name` of `path/of/file.py`
PLACED = re.compile(r"((?:`[\w.]+`(?: \([^)]*\))?(?:, | and )?)+) (?:of|in) `([\w./-]+\.(?:py|h|cuh|cpp))`")
SOURCES = [
    path
    for top in ("crate_kernels", "csrc", "tests", "benchmarks")
    for path in (pages.ROOT / top).rglob("*.*")
    if path.suffix in (".py", ".h", ".cuh", ".cpp")
]
MADE = pages.DOCS / "support.md"  # tests/ops/test_support.py makes its calls, and those that are refused


def spoken(page):
    """Return the expressions in a page's sentences that begin with a name of ours or of PyTorch."""
    found = []
    for text in dict.fromkeys(pages.inline(page)):
        try:
            expression = ast.parse(text, mode="eval").body
        except SyntaxError:
            continue
        if names(first(expression))[0] in MODULES.keys() | FUNCTIONS:
            found.append(expression)
    return found


def first(node):
    """Return what the first call of an expression calls; without a call, the expression."""
    while isinstance(node, ast.Call) or any(isinstance(part, ast.Call) for part in ast.walk(node)):
        if not isinstance(node, ast.Call | ast.Attribute):
            return node
        node = node.func if isinstance(node, ast.Call) else node.value
    return node


def names(node):
    return ast.unparse(node).split(".")


def resolve(path):
    """Return what dotted names mean; of a module that nothing has imported, how to find it."""
    root, *rest = path
    if root in FUNCTIONS:
        return resolve(["crate_kernels", root, *rest])
    where = MODULES[root]
    found = importlib.import_module(where)
    for name in rest:
        where = f"{where}.{name}"
        found = getattr(found, name) if hasattr(found, name) else find_spec(where)
        assert found is not None, where
    return found


@pytest.mark.parametrize("page", [page for page in pages.PAGES if page != MADE], ids=pages.name)
def test_code_in_sentences_fits_the_code(page):
    for expression in spoken(page):
        path = names(first(expression))
        found = resolve(path)
        for call in ast.walk(expression):
            if isinstance(call, ast.Call) and call.func is first(expression) and path[0] not in ("torch", "F"):
                hold(call, found)


def hold(call, function):
    """Check the keywords of a call against the signature, and those of a model against its config."""
    takes = inspect.signature(function).parameters.values()
    named = {one.name for one in takes if one.kind is not one.VAR_KEYWORD}
    free = any(one.kind is one.VAR_KEYWORD for one in takes)
    assert free or {keyword.arg for keyword in call.keywords} <= named, ast.unparse(call)
    if function is models.create and call.args:
        with torch.device("meta"):
            eval(ast.unparse(call), {"models": models, "crate_kernels": crate_kernels})


def test_sentences_are_found():
    assert sum(len(spoken(page)) for page in pages.PAGES) > 100


def placed():
    """Return (page, name, file) of each name that a sentence says a file to have."""
    return [
        (pages.name(page), name, file)
        for page in pages.PAGES
        for names, file in PLACED.findall(" ".join(pages.prose(page).split()))
        for name in re.findall(r"`([\w.]+)`", names)
    ]


@pytest.mark.parametrize(("page", "name", "file"), placed())
def test_a_name_is_in_the_file_that_a_sentence_says(page, name, file):
    homes = [path for path in SOURCES if f"/{path.as_posix()}".endswith(f"/{file}")]
    word = re.compile(rf"\b{name.rpartition('.')[2]}\b")
    assert any(word.search(path.read_text()) for path in homes), page


def test_names_in_files_are_found():
    assert len(placed()) > 20
