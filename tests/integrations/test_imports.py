"""What importing the package brings with it, and what each integration needs."""

import importlib.util
import subprocess
import sys

ALONE = """
import sys
import crate_kernels

found = {"transformers", "accelerate", "timm", "torchvision"} & sys.modules.keys()
assert not found, found
"""
WITHOUT_TIMM = """
sys.modules["timm"] = None
import tests.integrations.vision_schemas
from crate_kernels.integrations import transformers as integration
from transformers import AutoModelForImageClassification

config = integration.config("crate_tiny", depth=1, num_labels=2)
assert type(AutoModelForImageClassification.from_config(config)).__name__ == "CRATEForImageClassification"
"""


def test_the_package_imports_no_integration_and_transformers_needs_no_timm():
    """One process for both: importing PyTorch takes seconds."""
    code = ALONE + WITHOUT_TIMM if importlib.util.find_spec("transformers") else ALONE
    subprocess.run([sys.executable, "-c", code], check=True)
