"""What other libraries did to a module before ``patch`` that no probe can run past."""

from __future__ import annotations

from torch import Tensor, nn


def obstacle(module: nn.Module) -> str | None:
    """Return why a module cannot be probed, and what to do first; None if nothing is known to be in the way."""
    if any(hasattr(each, "_hf_hook") for each in module.modules()):
        first = "patch the model first, then dispatch or offload it"
        return f"accelerate runs it through a hook, which moves its weights: {first}"
    for name, child in module.named_modules():
        if name and hasattr(child, "in_features") and not _floating(getattr(child, "weight", None)):
            first = "patch the model first, then quantise it"
            return f"its {name} is quantised, which no probe can draw weights for: {first}"
    return None


def _floating(weight: object) -> bool:
    return isinstance(weight, Tensor) and weight.is_floating_point()
