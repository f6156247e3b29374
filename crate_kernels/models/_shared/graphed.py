"""A step that is called a few times, then captured in a CUDA graph and replayed: the host then costs one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_DEVICES = ("cuda",)
_CALLED = 3  # steps before the capture: kernels compile and load, and calls get their plans


def check(owner: str, config: Any, device: torch.device, use_cache: bool) -> None:
    """Require what can be captured: a GPU, steps of one size, and operators that do not wait for the device."""
    if device.type not in _DEVICES:
        raise ValueError(f"{owner}: tokens must be on a CUDA device with cuda_graph=True, got {device}")
    if not use_cache:
        raise ValueError(f"{owner}: use_cache must be True with cuda_graph=True: without caches each step is longer")
    if config.backend == "reference":
        raise ValueError(f"{owner}: backend must not be 'reference' with cuda_graph=True, which reads lengths")


def make_replayable(owner: str, caches: Sequence[Any]) -> None:
    """Make the next token's step right for any content of the caches, so that it may be captured and replayed.

    Raises:
        NotImplementedError: a cache of another library.
    """
    for cache in caches:
        if not hasattr(cache, "_make_replayable"):
            raise NotImplementedError(f"{owner}: cuda_graph must be False with caches of type {type(cache).__name__}")
        cache._make_replayable(1)


class Repeated:
    """Run a step, over and over.

    Args:
        step: takes nothing, and reads and writes tensors that stay where they are.
        device: the GPU.
        generator: what the step draws from; None for torch's own.
    """

    def __init__(self, step: Callable[[], None], device: torch.device, generator: torch.Generator | None) -> None:
        self._step, self._device, self._generator = step, device, generator
        self._called = 0
        self._graph: Any = None

    def __call__(self) -> None:
        """Run the step once."""
        if self._called < _CALLED:
            self._called += 1
            return self._step()
        with torch.cuda.device(self._device):
            if self._graph is None:
                self._graph = self._capture()
            self._graph.replay()

    def _capture(self) -> Any:
        graph = torch.cuda.CUDAGraph()
        if self._generator is not None:
            graph.register_generator_state(self._generator)
        # Other threads, such as those that load data, may allocate meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._step()
        return graph
