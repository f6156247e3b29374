"""Functions that wait for a module: they run once, with the module, when it is there."""

import importlib
import sys

import pytest

from crate_kernels._core import imports


@pytest.fixture
def waited_for(tmp_path, monkeypatch):
    (tmp_path / "waited_for.py").write_text("VALUE = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [each for each in sys.meta_path if not isinstance(each, imports._Finder)])
    monkeypatch.setattr(imports, "_waiting", {})
    yield "waited_for"
    sys.modules.pop("waited_for", None)


def test_functions_run_after_the_import_once_and_in_order(waited_for):
    seen = []
    for place in range(2):
        imports.when_imported(waited_for, lambda module, place=place: seen.append((place, module.VALUE)))
    assert sum(isinstance(each, imports._Finder) for each in sys.meta_path) == 1
    assert seen == []
    module = importlib.import_module(waited_for)
    assert seen == [(0, 3), (1, 3)]
    importlib.reload(module)
    assert len(seen) == 2
    imports.when_imported(waited_for, lambda found: seen.append(found))
    assert seen[2:] == [module]


def test_what_is_not_there_stays_an_import_error(waited_for):
    imports.when_imported("waited_for_in_vain", pytest.fail)
    with pytest.raises(ModuleNotFoundError, match="waited_for_in_vain"):
        importlib.import_module("waited_for_in_vain")
    assert importlib.import_module(waited_for).VALUE == 3
