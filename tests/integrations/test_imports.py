"""What importing the package brings with it, and what each integration needs."""

import subprocess
import sys

import pytest

ALONE = """
import sys
import crate_kernels, crate_kernels.models

found = {"transformers", "accelerate", "timm", "torchvision"} & sys.modules.keys()
assert not found, found
"""
WITHOUT_TIMM = """
import sys

sys.modules["timm"] = None
import tests.integrations.vision_schemas
from crate_kernels.integrations import transformers as integration
from transformers import AutoModelForImageClassification

config = integration.config("crate_tiny", depth=1, num_labels=2)
assert type(AutoModelForImageClassification.from_config(config)).__name__ == "CRATEForImageClassification"
"""


def run(code):
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_package_imports_no_integration():
    run(ALONE)


@pytest.mark.exhaustive  # importing transformers takes seconds
def test_transformers_needs_no_timm():
    pytest.importorskip("transformers", reason="needs transformers: the extra hf")
    run(WITHOUT_TIMM)
