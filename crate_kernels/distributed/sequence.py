"""Models of which each rank has a part of the tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from crate_kernels._core import checks
from crate_kernels.distributed import collectives, layout
from crate_kernels.distributed.api import FORMS, mssa, tssa
from crate_kernels.distributed.collectives import Group, Ranks
from crate_kernels.distributed.layout import SequenceLayout
from crate_kernels.models._shared.base import ReferenceModel
from crate_kernels.models._shared.language import LanguageModel
from crate_kernels.models.aot.mhsa import MHSA
from crate_kernels.models.crate import RateGradientStep
from crate_kernels.models.tost import ClassAttention, DropPath
from crate_kernels.nn import MSSA, TSSA, CausalMSSA, CausalTSSA, _linear

Model = TypeVar("Model", bound=nn.Module)

_NAME = "sequence_parallel"
_ATTENDING = (MHSA, RateGradientStep, ClassAttention, nn.MultiheadAttention)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class Sequence:
    """How the tokens of a model are cut.

    Attributes:
        ranks: the processes.
        form: of ``mssa``.
        balanced: ranks have head-tail chunks.
        where: the tokens of each rank in the sequence that a language model runs on; None asks the ranks.
    """

    def __init__(self, ranks: Ranks, form: str | None, balanced: bool) -> None:
        self.ranks, self.form, self.balanced = ranks, form, balanced
        self.where: SequenceLayout | None = None

    def options(self, cache: Any) -> dict[str, Any]:
        """Return what the operators take besides a module's own options."""
        if cache is not None:
            _refuse_caches()
        return {"seqlen": None if self.where is None else self.where.seqlen}

    def run(self, where: SequenceLayout | None, block: nn.Module, *args: Any) -> Tensor:
        """Run a block on tokens of that layout: a backward that recomputes it may follow calls of other lengths."""
        latest, self.where = self.where, where
        try:
            return block(*args)
        finally:
            self.where = latest


def _refuse_caches() -> NoReturn:
    raise NotImplementedError(
        f"{_NAME}: caches must be None: each rank has a part of the tokens; decode in one process"
    )


class _Attention(nn.Module):
    """The class of an attention module whose tokens are divided among ranks."""

    _sequence: Sequence

    def _attention(self, *_: Any) -> NoReturn:
        raise NotImplementedError(f"{_NAME}: return_attention must be False: no rank has all tokens")

    def new_cache(self, *_: Any, **__: Any) -> NoReturn:
        _refuse_caches()


class _Subspace(_Attention):
    def _operator(self, w: Tensor, *, cache: Any = None, **options: Any) -> Tensor:
        cut = self._sequence
        rest = {"form": cut.form, "balanced": cut.balanced, **cut.options(cache), **options}
        return mssa(w, cut.ranks.group, **rest)


class _TokenStats(_Attention):
    def _operator(self, w: Tensor, temp: Tensor, *, cache: Any = None, **options: Any) -> Tensor:
        return tssa(w, temp, self._sequence.ranks.group, **self._sequence.options(cache), **options)


class _Language(LanguageModel):
    """The class of a language model: takes all tokens; returns the logits of this rank's and the loss of all."""

    _sequence: Sequence
    _synchronised: bool

    def hidden(
        self, tokens: Tensor, *, key_padding_mask: Tensor | None = None, caches: Any = None, offsets: Any = None
    ) -> Tensor:
        """Return the input of the head of this rank's tokens, from all tokens and their mask."""
        owner, block_size = self._name, self.config.block_size
        if caches is not None or offsets is not None:
            _refuse_caches()
        if isinstance(self, FSDPModule) and not self._synchronised:
            raise RuntimeError(f"{_NAME}: call fully_shard before {_NAME}, which tells it how to add up gradients")
        if not isinstance(tokens, Tensor) or tokens.dim() != 2:
            return super().hidden(tokens)  # which refuses them
        if tokens.shape[1] > block_size:
            raise ValueError(f"{owner}: tokens must be at most block_size = {block_size} long, got {tokens.shape[1]}")
        cut = self._sequence
        cut.where = layout.split(tokens.shape[1], cut.ranks.size, cut.balanced)
        mask = None if key_padding_mask is None else _own(cut, key_padding_mask)
        return super().hidden(_own(cut, tokens), key_padding_mask=mask)

    def _runner(self, block: nn.Module) -> Callable[..., Tensor]:
        return partial(self._sequence.run, self._sequence.where, block)

    @checks.closed
    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, **unknown: NoReturn
    ) -> tuple[Tensor, Tensor | None]:
        """Predict the next tokens.

        Args:
            tokens: (batch, seqlen) of the whole sequence, the same in all ranks.
            targets: (batch, seqlen) of the whole sequence; -1 is ignored; none by default.

        Returns:
            ``(logits, loss)``: logits of this rank's tokens (``unshard`` has those of all), and the mean
            cross-entropy of all tokens, the same in all ranks, or None.
        """
        if isinstance(unknown, dict) and unknown:
            checks.no_keyword(_Language.forward, unknown)
        logits = _linear.linear(self.lm_head, self.hidden(tokens), self.config.backend)
        if targets is None:
            return logits, None
        if targets.shape != tokens.shape:
            wanted = f"{self._name}: targets must be tokens' shape {tuple(tokens.shape)}"
            raise ValueError(f"{wanted}, got {tuple(targets.shape)}")
        own = _own(self._sequence, targets)
        total = F.cross_entropy(logits.flatten(0, 1), own.flatten(), ignore_index=-1, reduction="sum")
        return logits, cast(Tensor, _Sum.apply(total / (targets != -1).sum(), self._sequence.ranks))

    def new_caches(self, batch: int, max_seqlen: int) -> NoReturn:
        """Refuse."""
        _refuse_caches()

    def generate(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse."""
        _refuse_caches()


class _Sum(torch.autograd.Function):
    """The sum over ranks of a number; each rank's part of it has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        return ranks.sum_(x.clone())

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return dout, None


def _own(cut: Sequence, whole: Tensor) -> Tensor:
    """Return this rank's part of a tensor (batch, seqlen)."""
    assert cut.where is not None
    return cut.where.cut(whole, cut.ranks.rank, 1)


_KINDS: dict[type[nn.Module], type[nn.Module]] = {
    MSSA: _Subspace,
    CausalMSSA: _Subspace,
    TSSA: _TokenStats,
    CausalTSSA: _TokenStats,
    LanguageModel: _Language,
}


@checks.suggesting
def sequence_parallel(model: Model, group: Group, *, form: str | None = None, balanced: bool = False) -> Model:
    """Let the ranks of a group each compute a part of a model's sequences.

    A language model takes the whole tokens and targets, the same in all ranks, and cuts them itself; its logits are
    those of this rank's tokens, its loss that of all. Other modules take and return the tokens of this rank. Positions
    are those of the whole sequence. Gradients of parameters are added up over the group during the backward pass, so
    that every rank has those of one process. A model sharded by ``fully_shard`` does that itself: shard first, over a
    mesh that includes the group, of one dimension or of replicas and shards; its gradients then are means over the
    other ranks and sums over the group. ``tensor_parallel`` comes before both. With ``DistributedDataParallel``, wrap
    afterwards, over the ranks that have other data.

    Caches, attention weights, and dropout other than the attention's are refused, that of whole images included.
    Recompute activations by the config's ``grad_checkpointing``, which remembers the lengths of each call.

    Args:
        model: a language model of ``crate_kernels.models``, a module of ``crate_kernels.nn``, or blocks of them;
            changed in place.
        group: the process group, or a DeviceMesh of one dimension.
        form: form of ``distributed.mssa``; default None, the best for the number of heads.
        balanced: cut into head-tail chunks, which suits causal attention in the forms "gather" and "ring"; not for
            token statistics. Default False.

    Returns:
        ``model``.

    Raises:
        TypeError, ValueError: an argument that does not fit.
        NotImplementedError: a model that mixes tokens in another way.
    """
    ranks = collectives.ranks(_NAME, group)
    checks.flag(_NAME, "balanced", balanced)
    if form is not None and form not in FORMS:
        raise ValueError(f"{_NAME}: form must be None or one of {', '.join(FORMS)}, got {form!r}")
    _check_model(model, balanced)
    sequence = Sequence(ranks, form, balanced)
    for module in model.modules():
        for kind, base in _KINDS.items():
            if isinstance(module, kind):
                name = f"SequenceParallel{type(module).__name__}"
                module.__class__ = type(name, (base, type(module)), {"_sequence": sequence, "_synchronised": False})
        if isinstance(module, LanguageModel):
            module.transformer["wpe"].register_forward_pre_hook(lambda _, args: _positions(sequence, *args))
        if isinstance(module, (*_DROPOUTS, DropPath)):
            module.register_forward_pre_hook(_refuse_dropout)
    _add_up_gradients(model, ranks)
    return model


def _check_model(model: nn.Module, balanced: bool) -> None:
    checks.module(_NAME, "model", model)
    for name, module in model.named_modules():
        if isinstance(module, _Attention):
            raise ValueError(f"{_NAME}: model must not be parallel already")
        if balanced and isinstance(module, (TSSA, CausalTSSA)):
            raise ValueError(f"{_NAME}: balanced must be False for token statistics, which sum in the tokens' order")
        instead = _instead_of(module)
        if instead is not None:
            wanted = "a language model of subspaces or token statistics, or modules of crate_kernels.nn"
            where = f" with {type(module).__name__} {name}" if name else ""
            raise NotImplementedError(f"{_NAME}: model must be {wanted}, got {type(model).__name__}{where}: {instead}")


def _instead_of(module: nn.Module) -> str | None:
    """Return what to do instead of cutting a module that mixes its tokens, or takes them, in another way."""
    if isinstance(module, ReferenceModel) and not isinstance(module, LanguageModel):
        return "cut its blocks alone, or shard it by fully_shard"
    if isinstance(module, _ATTENDING):
        return "it would attend to this rank's tokens alone; take MSSA or TSSA of crate_kernels.nn"
    if hasattr(type(module), "_crate_kernels"):  # as patch marks its classes
        return "it is patched and would see this rank's tokens alone; take a model of crate_kernels instead"
    wrapper = any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__)
    if wrapper and any(isinstance(part, (CausalMSSA, CausalTSSA)) for part in module.modules()):
        return "it places this rank's tokens as if they were all; take the language model of crate_kernels.models"
    return None


def _positions(sequence: Sequence, own: Tensor) -> tuple[Tensor]:
    """Return the places of this rank's tokens in the sequence, for the embedding, instead of those among its own."""
    assert sequence.where is not None
    return (sequence.where.positions(sequence.ranks.rank, own.device),)


def _refuse_dropout(module: nn.Module, *_: Any) -> None:
    rate = module.rate if isinstance(module, DropPath) else cast(nn.Dropout, module).p
    if module.training and rate:
        raise NotImplementedError(
            f"{_NAME}: dropout of tokens must be 0 in training, got {rate}: no rank knows the masks of the others"
        )


def _add_up_gradients(model: nn.Module, ranks: Ranks) -> None:
    """Add up the gradients of parameters over the ranks, by hooks or by fully_shard."""
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if sharded:
        _tell_fsdp(model, sharded, ranks)
    else:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda grad: _sum_of(grad, ranks))
    for module in model.modules():
        if isinstance(module, _Language):
            module._synchronised = bool(sharded)


def _sum_of(grad: Tensor, ranks: Ranks) -> Tensor:
    """Return the sum of a gradient over the ranks; of a DTensor, that of each rank's part."""
    total = grad.clone(memory_format=torch.contiguous_format)
    ranks.sum_(total.to_local() if isinstance(total, DTensor) else total)
    return total


def _tell_fsdp(model: nn.Module, sharded: Iterable[FSDPModule], ranks: Ranks) -> None:
    """Have fully_shard divide gradients by the number of ranks with other data, where it took all ranks."""
    members = set(dist.get_process_group_ranks(ranks.group))
    sizes = set()
    for name, parameter in model.named_parameters():
        sharing = _sharing(parameter)
        if not members <= sharing:
            wanted = f"{_NAME}: fully_shard's mesh must include group, whose ranks are {sorted(members)}"
            raise ValueError(f"{wanted}, got {sorted(sharing) or 'none'} for {name}")
        sizes.add(len(sharing))
    if len(sizes) > 1:
        raise ValueError(f"{_NAME}: fully_shard's mesh must be the same for all parameters, got {sorted(sizes)} ranks")
    data = max(sizes, default=ranks.size) // ranks.size
    for module in sharded:
        module.set_gradient_divide_factor(float(data))
        if dist.get_backend(ranks.group) != "nccl":
            module.set_force_sum_reduction_for_comms(True)  # others cannot multiply before they add


def _sharing(parameter: nn.Parameter) -> set[int]:
    """Return the ranks that fully_shard adds up the gradient of a parameter over.

    They are along the first dimensions of its mesh: replicas if there are any, then shards, then what tensor
    parallelism has cut.
    """
    if not isinstance(parameter, DTensor):
        return set()
    own = 1 + next(n for n, place in enumerate(parameter.placements) if not place.is_replicate())
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None
    return set(parameter.device_mesh.mesh[(..., *coordinate[own:])].flatten().tolist())
