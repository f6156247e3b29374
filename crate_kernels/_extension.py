"""Loads the C++ extension where it was built: beside the package, or in the user's cache."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import torch  # noqa: F401  # whose libraries the extension links against

from crate_kernels import _build

_NAME = "crate_kernels._C"
# Looked for once: a call must cost no look at the disk.
PATH = _build.find()


def load() -> ModuleType:
    """Return the module ``_C``; loading it registers ``torch.ops.crate_kernels_C.*``."""
    module = sys.modules.get(_NAME)
    if module is None:
        if PATH is None:
            raise ImportError("crate_kernels: the C++ extension is not built; python -m crate_kernels build")
        spec = importlib.util.spec_from_file_location(_NAME, PATH)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[_NAME] = module
    return module
