"""The model card of a saved folder: what a hub shows, and how to load the model."""

from __future__ import annotations

import os
from pathlib import Path

from transformers import AutoConfig

from crate_kernels._core import checks, files

_PIPELINES = {"CausalLM": "text-generation", "ImageClassification": "image-classification"}


@checks.suggesting
def card(folder: str | os.PathLike[str], *, license: str) -> Path:
    """Write ``README.md`` into a folder that ``save_pretrained`` wrote.

    Args:
        folder: the folder.
        license: short name of the licence of the weights, as the hub spells it: ``"mit"``, ``"apache-2.0"``.

    Returns:
        The file.

    Raises:
        FileExistsError: there is one; it is not replaced.
        ValueError: the folder names no class.
    """
    path = Path(folder) / "README.md"
    if path.exists():
        raise FileExistsError(f"card: README.md must not exist in {folder}")
    architectures = AutoConfig.from_pretrained(folder).architectures or []
    task = next((task for task in _PIPELINES if architectures and architectures[0].endswith(f"For{task}")), None)
    if task is None:
        raise ValueError(f"card: {folder} must be of a model for one of {', '.join(_PIPELINES)}, got {architectures}")
    text = f"""---
library_name: transformers
license: {license}
pipeline_tag: {_PIPELINES[task]}
tags: [crate_kernels, white-box]
---

# {architectures[0]}

A white-box transformer, computed by `crate_kernels`.

```python
import crate_kernels.integrations.transformers
from transformers import AutoModelFor{task}

model = AutoModelFor{task}.from_pretrained("<this repository>")
```
"""
    return files.put(path, text.encode())
