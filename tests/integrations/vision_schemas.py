"""torchvision can be imported beside a CPU build of PyTorch, for which PyPI has no torchvision.

Importing torchvision registers functions for two operators of its extension, which such a PyTorch cannot load. Their
schemas are all it needs; nothing here calls them.
"""

import importlib.util
from importlib.metadata import version

import torch

# A build for the CPU brings both operators itself.
if importlib.util.find_spec("torchvision") and torch.version.cuda is None and "+cpu" not in version("torchvision"):
    _LIBRARY = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
