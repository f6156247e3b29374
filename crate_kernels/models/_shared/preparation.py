"""How images are prepared for a model, in a file that transformers reads for its pipelines."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from crate_kernels._core import files
from crate_kernels.models._shared import vision

FILE = "preprocessor_config.json"
_CROPPED = 0.875  # of the shorter edge
# Of ImageNet, by which the published models were trained.
_MEAN, _STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
_BICUBIC = 3


def write(folder: Path, model: Any) -> None:
    """Write how images are prepared for a model, as by timm's defaults, unless the folder says how already.

    Nothing is written for images of other than three channels.
    """
    layout, path = getattr(model, "layout", None), folder / FILE
    if layout is None or model.in_chans != len(_MEAN) or path.exists() or not folder.is_dir():
        return
    height, width = vision.pair(FILE, layout.img_size, getattr(model.config, layout.img_size))
    prepared = {
        "image_processor_type": "CLIPImageProcessor",  # resizes, crops the centre, scales: nothing of CLIP itself
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": math.ceil(max(height, width) / _CROPPED)},
        "resample": _BICUBIC,
        "do_center_crop": True,
        "crop_size": {"height": height, "width": width},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": _MEAN,
        "image_std": _STD,
    }
    files.put(path, (json.dumps(prepared, indent=2) + "\n").encode())
