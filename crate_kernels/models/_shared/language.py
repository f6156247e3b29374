"""Frame of the language models, that of nanoGPT: embeddings, blocks, a head, generation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crate_kernels._core import checks
from crate_kernels.models._shared import fields
from crate_kernels.models._shared import generate as _generate
from crate_kernels.models._shared.base import ReferenceModel, place, run
from crate_kernels.nn import _linear, _symbols


@dataclass(frozen=True)
class LanguageConfig:
    """Config fields that all language models have.

    Attributes:
        block_size: longest sequence, which is the number of positions.
        vocab_size: number of tokens; 50304 is GPT-2's 50257, padded to a multiple of 64.
        n_layer, n_head, n_embd: layers, heads and width.
        dropout: rate in attention, after it and on the embedded tokens.
        bias: give norms and projections a bias, if the published model has the choice.
        tie_word_embeddings: use the matrix of the embedding as the head too, as every published model does.
        grad_checkpointing: recompute each block in the backward instead of keeping its activations.
        backend: backend of the operators; None is the best available.

    Raises:
        ValueError, TypeError: an invalid value.
    """

    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True
    tie_word_embeddings: bool = True
    grad_checkpointing: bool = False
    backend: str | None = None

    def __post_init__(self) -> None:
        owner = type(self).__name__.removesuffix("Config")
        fields.check_types(owner, self)
        checks.multiple(owner, "n_embd", self.n_embd, "n_head", self.n_head)
        checks.number(owner, "dropout", self.dropout, minimum=0.0, below=1.0)


class LanguageModel(ReferenceModel):
    """Predict the next token.

    Parameters: ``transformer.wte`` (vocab_size, n_embd), ``transformer.wpe`` (block_size, n_embd),
    ``transformer.h.{i}``, ``transformer.ln_f`` where there is one, and ``lm_head``, which is ``wte`` again if
    ``tie_word_embeddings``.

    Args:
        config: sizes.
        blocks: modules from (tokens, key_padding_mask, cache) to tokens, whose ``attn`` has
            ``new_cache(batch, max_seqlen)``.
        final_norm: norm before the head; None for none.
    """

    config: LanguageConfig
    task = "ForCausalLM"

    def __init__(self, config: LanguageConfig, blocks: Iterable[nn.Module], final_norm: nn.Module | None) -> None:
        super().__init__(config)
        parts: dict[str, nn.Module] = {
            "wte": nn.Embedding(config.vocab_size, config.n_embd),
            "wpe": nn.Embedding(config.block_size, config.n_embd),
            "drop": nn.Dropout(config.dropout),
            "h": nn.ModuleList(blocks),
        }
        if final_norm is not None:
            parts["ln_f"] = final_norm
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            cast(nn.Embedding, parts["wte"]).weight = self.lm_head.weight
        self._initialise()

    def _initialise(self) -> None:
        """Draw every matrix with standard deviation 0.02, less at the end of a residual branch, as GPT-2 does."""
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                ends = name.endswith("c_proj")
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * self.config.n_layer) if ends else 0.02)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)

    def num_parameters(self) -> int:
        """Count the parameters as the papers do: without positions, a tied head once."""
        positions = cast(nn.Embedding, self.transformer["wpe"]).weight.numel()
        return sum(p.numel() for p in self.parameters()) - positions

    def new_caches(self, batch: int, max_seqlen: int) -> list[Any]:
        """Return an empty cache for each layer, for ``batch`` sequences of up to ``max_seqlen`` tokens."""
        return [block.attn.new_cache(batch, max_seqlen) for block in cast(Any, self.transformer["h"])]

    def hidden(
        self,
        tokens: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        caches: Sequence[Any] | None = None,
        offsets: Tensor | None = None,
    ) -> Tensor:
        """Return the input of the head.

        Args:
            tokens: (batch, seqlen), int64 or int32.
            key_padding_mask: (batch, seqlen) bool, True = keep; only padding on the right makes sense here.
            caches: caches from ``new_caches`` to continue and update; none by default.
            offsets: (batch,) int64, number of cached tokens per sequence; 0 by default.

        Returns:
            (batch, seqlen, n_embd).

        Raises:
            ValueError: tokens of another shape or dtype, more of them than ``block_size``, or, on a CPU, one that is
                not in the vocabulary.
        """
        owner, block_size = type(self).__name__, self.config.block_size
        _check_tokens(owner, tokens)
        checks.indices(owner, "tokens", tokens, self.config.vocab_size)
        if tokens.shape[1] > block_size:
            raise ValueError(f"{owner}: tokens must be at most block_size = {block_size} long, got {tokens.shape[1]}")
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        if offsets is not None:
            positions = positions + offsets[:, None]
        placed = place(cast(nn.Embedding, self.transformer["wpe"]), positions, tokens.shape[0])
        x = self.transformer["drop"](self.transformer["wte"](tokens) + placed)
        for index, block in enumerate(cast(nn.ModuleList, self.transformer["h"])):
            cache = None if caches is None else caches[index]
            x = run(self.config.grad_checkpointing, self._runner(block), x, key_padding_mask, cache)
        return self.transformer["ln_f"](x) if "ln_f" in self.transformer else x

    def _runner(self, block: nn.Module) -> Callable[..., Tensor]:
        """Return what runs a block in this call and, if activations are recomputed, in the call's backward."""
        return block

    @checks.closed
    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, **unknown: NoReturn
    ) -> tuple[Tensor, Tensor | None]:
        """Predict the next tokens.

        Args:
            tokens: (batch, seqlen), int64 or int32, at most ``block_size`` long.
            targets: (batch, seqlen) int64, the next tokens; -1 is ignored; none by default.

        Returns:
            ``(logits, loss)`` as the published classes: logits (batch, seqlen, vocab_size) of every token (without
            targets, the published classes return only the last token's), and the mean cross-entropy, or None.

        Raises:
            ValueError: tokens or targets of another shape or dtype, more of them than ``block_size``, or, on a CPU, one
                that is not in the vocabulary.
        """
        if isinstance(unknown, dict) and unknown:
            checks.no_keyword(LanguageModel.forward, unknown)
        logits = _linear.linear(self.lm_head, self.hidden(tokens), self.config.backend)
        if targets is None:
            return logits, None
        if targets.shape != tokens.shape:
            wanted = f"{type(self).__name__}: targets must be tokens' shape {tuple(tokens.shape)}"
            raise ValueError(f"{wanted}, got {tuple(targets.shape)}")
        checks.indices(type(self).__name__, "targets", targets, self.config.vocab_size, start=-1)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    def generate(
        self,
        tokens: Tensor | Sequence[Tensor],
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
        *,
        use_cache: bool = True,
        cuda_graph: bool = False,
    ) -> Tensor | list[Tensor]:
        """Continue prompts, always in evaluation mode; the model's mode is restored.

        A token costs one step with the layers' caches, where the published code runs the whole window again.
        Once a sequence is longer than ``block_size``, the window moves, positions change and caches are invalid:
        then the last ``block_size`` tokens are run again per token, here too.

        Args:
            tokens: (batch, seqlen) int64 prompts; or a list of 1-D prompts of any lengths, continued in one batch.
            max_new_tokens: number of tokens to add to each prompt.
            temperature: divides the logits; 0 takes the likeliest token.
            top_k: sample from the likeliest ``top_k`` tokens; all by default.
            top_p: sample from the fewest likeliest tokens that have at least this probability together; all by
                default. Applied after ``top_k`` if both are given.
            generator: random generator on the tokens' device; torch's own by default.
            use_cache: False runs the whole window for every token, for comparison.
            cuda_graph: capture a step with caches in a CUDA graph and replay it, on a CUDA device; False by default.
                Sampling then does not see whether logits are NaN.

        Returns:
            (batch, seqlen + max_new_tokens); or a list of 1-D tensors for a list.

        Raises:
            ValueError, TypeError: invalid prompts or settings; ``cuda_graph`` on another device, without caches or with
                the backend "reference".
            NotImplementedError: ``cuda_graph`` with a layer whose cache is not one of this library's.
        """
        sampling = _generate.Sampling(temperature, top_k, top_p, generator)
        return _generate.generate(self, tokens, max_new_tokens, sampling, use_cache, cuda_graph)


def _check_tokens(owner: str, tokens: object) -> None:
    """Require (batch, seqlen) integers."""
    _symbols.refuse(owner, tokens)
    if not isinstance(tokens, Tensor):
        raise TypeError(f"{owner}: tokens must be a Tensor (batch, seqlen), got {type(tokens).__name__}")
    if tokens.dim() != 2 or tokens.dtype not in (torch.int64, torch.int32):
        got = f"{tokens.dtype} {tuple(tokens.shape)}"
        raise ValueError(f"{owner}: tokens must be int64 or int32 (batch, seqlen), got {got}")
