"""What an integration needs to be imported."""

import subprocess
import sys

import pytest

WITHOUT_TIMM = """
import sys

sys.modules["timm"] = None
import tests.integrations.vision_schemas
from crate_kernels.integrations import transformers as integration
from transformers import AutoModelForImageClassification

config = integration.config("crate_tiny", depth=1, num_labels=2)
assert type(AutoModelForImageClassification.from_config(config)).__name__ == "CRATEForImageClassification"
"""


@pytest.mark.exhaustive  # importing transformers takes seconds
def test_transformers_needs_no_timm():
    pytest.importorskip("transformers", reason="needs transformers: the extra hf")
    subprocess.run([sys.executable, "-c", WITHOUT_TIMM], check=True)
