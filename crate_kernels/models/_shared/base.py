"""Base of the reference models: a config, weight-decay groups, saving and loading."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from crate_kernels._core import checks
from crate_kernels.models._shared import pretrained

Self = TypeVar("Self", bound="ReferenceModel")
Output = TypeVar("Output")


class ReferenceModel(pretrained.Configured):
    """A published model.

    Args:
        config: sizes and options; kept as ``self.config``.
    """

    decays_vectors = False  # True if published training decays biases and norms too

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuse ``torch.jit.script``, which calls this: it takes neither keyword-only arguments nor our operators."""
        raise NotImplementedError(f"{self._name}: torch.jit.script cannot take it; use torch.compile or torch.export")

    def no_weight_decay(self) -> set[str]:
        """Name the parameters, other than vectors, that published training does not decay."""
        return set()

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Sort the trainable parameters into two groups for an optimiser: decayed, and not.

        The second group has the vectors (biases, norms, layer scales), except in CRATE, whose published training
        decays them, and the parameters that ``no_weight_decay`` names. A parameter with two names, such as a tied
        head, is listed once.

        Args:
            weight_decay: weight decay of the first group, at least 0.

        Returns:
            Two dicts of ``params`` and ``weight_decay``, as ``torch.optim`` takes them.
        """
        weight_decay = checks.number(self._name, "weight_decay", weight_decay, minimum=0.0)
        undecayed = self.no_weight_decay()
        decayed, plain = [], []
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                vector = parameter.dim() < 2 and not self.decays_vectors
                (plain if vector or name in undecayed else decayed).append(parameter)
        return [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]

    def save_pretrained(
        self, folder: str | os.PathLike[str], *, state_dict: Mapping[str, Tensor] | None = None
    ) -> Path:
        """Write ``config.json`` and ``model.safetensors`` into a folder, created if missing.

        A process of a sharded model (``fully_shard``, tensor parallelism) has only parts of the weights. Gather
        them in all processes and save them in one::

            from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            state = get_model_state_dict(model, options=options)
            if torch.distributed.get_rank() == 0:
                model.save_pretrained(folder, state_dict=state)

        Args:
            folder: destination; files of these names in it are replaced, each in one move.
            state_dict: the whole weights, needed if the model's own are sharded; by default the model's own.

        Returns:
            The folder.

        Raises:
            ValueError: sharded weights, or a ``state_dict`` of another model.
        """
        return pretrained.save(self, checks.path("save_pretrained", "folder", folder), state_dict)

    @classmethod
    def from_pretrained(cls: type[Self], folder: str | os.PathLike[str], **overrides: Any) -> Self:
        """Build the model that ``save_pretrained`` wrote.

        Args:
            folder: the folder that ``save_pretrained`` wrote.
            **overrides: fields of the config to change, such as ``backend`` or ``dropout``.

        Returns:
            The model, on torch's default device.

        Raises:
            FileNotFoundError: the folder lacks a file.
            ValueError: an invalid config or one of another model, weights that do not fit it, or a damaged file.
            TypeError: a field of the wrong type.
        """
        return pretrained.load(cls, checks.path("from_pretrained", "folder", folder), overrides)


def run(recompute: bool, function: Callable[..., Output], *args: Any) -> Output:
    """Call ``function``; with ``recompute`` its activations are recomputed in the backward instead of kept.

    Nones at the end are left out: opacus takes each argument of a layer that it hooks for a tensor.
    """
    while args[-1] is None:
        args = args[:-1]
    if recompute and torch.is_grad_enabled():
        return checkpoint(function, *args, use_reentrant=False)  # pyright: ignore[reportReturnType]
    return function(*args)


def place(positions: nn.Embedding, indices: Tensor, batch: int) -> Tensor:
    """Return the positions (seqlen, dim), or (batch, seqlen, dim) where a hook waits for their gradient.

    Opacus takes the first dimension of what a hooked layer gets for the samples.
    """
    shared = indices.dim() == 1 and not positions._backward_hooks
    return positions(indices if shared else indices.expand(batch, indices.shape[-1]))


class Stack(nn.Module):
    """Layers one after the other, in the list ``layers``."""

    def __init__(self, layers: Iterable[nn.Module], grad_checkpointing: bool) -> None:
        super().__init__()
        self.grad_checkpointing = grad_checkpointing
        self.layers = nn.ModuleList(layers)

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.layers)

    def forward(self, x: Tensor, layers: int | None = None) -> Tensor:
        """Run the first ``layers`` layers on (batch, seqlen, dim) tokens; all by default."""
        for layer in self.layers[:layers]:
            x = run(self.grad_checkpointing, layer, x)
        return x


class DropPath(nn.Module):
    """Drop whole images of a branch at random in training, and scale up the others."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` (batch, ...) with some images zeroed."""
        if not self.training or self.rate == 0:
            return x
        kept = torch.empty(x.shape[0], *[1] * (x.dim() - 1), dtype=x.dtype, device=x.device).bernoulli_(1 - self.rate)
        return x * (kept / (1 - self.rate))


def path_rates(rate: float, depth: int) -> Iterator[float]:
    """Return each layer's rate of dropped branches: from 0 to ``rate``; one by one, since a file may say any depth."""
    return (rate * index / max(1, depth - 1) for index in range(depth))


class PreNorm(nn.Module):
    """Apply ``fn`` to layer-normalised tokens; parameters ``norm.*`` and ``fn.*``.

    Args:
        dim: width of a token.
        fn: the module after the norm.
        eps: of the norm.
        drop_path: part of the images for which the result is zero in training; default 0.
    """

    def __init__(self, dim: int, fn: nn.Module, eps: float = 1e-5, drop_path: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, eps)
        self.fn = fn
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, **kwargs: bool) -> Tensor:
        """Return ``fn(norm(x), **kwargs)``; with keywords, which ask for something else, no image is dropped."""
        out = self.fn(self.norm(x), **kwargs)
        return out if kwargs else self.drop_path(out)
