"""A pretended GPU that was timed: calls on CPU tensors choose as on it."""

import json
from contextlib import contextmanager

import pytest

from crate_kernels._core import measured, plan


@contextmanager
def named(gpu):
    """Pretend that every device is a GPU of this name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured, "gpu_name", lambda device: gpu)
        patch.setattr(measured, "_tables", {})
        plan.forget()
        yield
    plan.forget()


@contextmanager
def with_table(classes, folder):
    """Pretend that a GPU has this table."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured, "FOLDER", folder)
        measured.path_of("NVIDIA None").write_text(json.dumps({"classes": classes}))
        with named("NVIDIA None"):
            yield
