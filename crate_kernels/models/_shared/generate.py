"""Continue prompts token by token, with caches of one tensor per layer or of a constant size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from crate_kernels._core import checks
from crate_kernels.models._shared import graphed
from crate_kernels.nn import _linear

Model = Any  # a LanguageModel: its module imports this one


class Sampling(NamedTuple):
    """How a token is drawn, as in ``LanguageModel.generate``."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    generator: torch.Generator | None = None

    def check(self, owner: str) -> None:
        """Require valid settings."""
        checks.number(owner, "temperature", self.temperature, minimum=0.0)
        if self.top_k is not None:
            checks.integer(owner, "top_k", self.top_k, minimum=1)
        if self.top_p is not None and not 0 < checks.number(owner, "top_p", self.top_p) <= 1:
            raise ValueError(f"{owner}: top_p must be in (0, 1], got {self.top_p}")

    def choose(self, logits: Tensor, waits: bool = True) -> Tensor:
        """Draw a token (batch, 1) from logits (batch, vocab_size); unless it ``waits``, also of logits that are NaN."""
        if self.temperature == 0:
            return logits.argmax(-1, keepdim=True)
        logits = logits.float()
        # The largest logit is 0: a small temperature gives -inf for the others, one that rounds to 0 would give 0 / 0.
        temperature = max(self.temperature, torch.finfo(logits.dtype).smallest_normal)
        logits = (logits - logits.amax(-1, keepdim=True)) / temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            smallest = logits.topk(self.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < smallest, -torch.inf)
        if self.top_p is not None:
            ordered, order = logits.softmax(-1).sort(descending=True)
            before = ordered.cumsum(-1) - ordered  # the likeliest token has 0 before it, so it always stays
            dropped = torch.zeros_like(before).scatter(1, order, before) >= self.top_p
            logits = logits.masked_fill(dropped, -torch.inf)
        probabilities = logits.softmax(-1)
        if waits:
            return torch.multinomial(probabilities, 1, generator=self.generator)
        # The draw of multinomial, which first reads whether all probabilities are numbers: a capture cannot wait.
        draws = torch.empty_like(probabilities).exponential_(generator=self.generator)
        return (probabilities / draws).argmax(-1, keepdim=True)


@torch.no_grad()
def generate(
    model: Model,
    tokens: Tensor | Sequence[Tensor],
    max_new_tokens: int,
    sampling: Sampling,
    use_cache: bool,
    cuda_graph: bool,
) -> Tensor | list[Tensor]:
    """Implement ``LanguageModel.generate``."""
    owner = f"{type(model).__name__}.generate"
    prompts, lengths, ragged = _prompts(owner, tokens)
    checks.integer(owner, "max_new_tokens", max_new_tokens, minimum=0)
    sampling.check(owner)
    if checks.flag(owner, "cuda_graph", cuda_graph):
        graphed.check(owner, model.config, prompts.device, use_cache)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        text = prompts.new_zeros(prompts.shape[0], prompts.shape[1] + max_new_tokens)
        text[:, : prompts.shape[1]] = prompts
        step = _Cached(model, lengths, ragged) if use_cache else _Windowed(model)

        def add(longest: int, waits: bool = True) -> None:
            """Add a token to each sequence."""
            logits = _linear.linear(model.lm_head, step(text, longest, lengths), model.config.backend)
            text.scatter_(1, lengths[:, None], sampling.choose(logits, waits).to(text.dtype))
            lengths.add_(1)

        def add_alike() -> None:
            """Add a token to each sequence by a step that serves all later ones."""
            graphed.make_replayable(owner, step.caches or ())
            add(0, waits=False)

        repeated = graphed.Repeated(add_alike, text.device, sampling.generator)
        for longest in range(prompts.shape[1], text.shape[1]):
            if longest > model.config.block_size:
                step = _Windowed(model)
            if cuda_graph and step.caches is not None:
                repeated()
            else:
                add(longest)
    finally:
        for module, training in modes:
            module.training = training
    if isinstance(tokens, Tensor):
        return text
    return [row[:length] for row, length in zip(text, lengths.tolist(), strict=True)]


class _Windowed:
    """Run the last ``block_size`` tokens of each sequence again for every new token."""

    caches = None

    def __init__(self, model: Model) -> None:
        self.model = model

    def __call__(self, text: Tensor, longest: int, lengths: Tensor) -> Tensor:
        """Return the hidden state (batch, n_embd) of each sequence's last token."""
        size = min(longest, self.model.config.block_size)
        start = (lengths - size).clamp(min=0)
        # The window of a shorter sequence goes past its end; attention is causal, so this changes no earlier token.
        window = text.gather(1, start[:, None] + torch.arange(size, device=text.device))
        return _at(self.model.hidden(window), lengths - start - 1)


class _Cached:
    """Run the prompts once, then each new token alone."""

    def __init__(self, model: Model, lengths: Tensor, ragged: bool) -> None:
        self.model, self.ragged = model, ragged
        self.caches = None

    def __call__(self, text: Tensor, longest: int, lengths: Tensor) -> Tensor:
        """Return the hidden state (batch, n_embd) of each sequence's last token."""
        if self.caches is not None:
            last = text.gather(1, lengths[:, None] - 1)
            return self.model.hidden(last, caches=self.caches, offsets=lengths - 1)[:, 0]
        self.caches = self.model.new_caches(text.shape[0], min(text.shape[1], self.model.config.block_size))
        mask = torch.arange(longest, device=text.device) < lengths[:, None] if self.ragged else None
        return _at(self.model.hidden(text[:, :longest], key_padding_mask=mask, caches=self.caches), lengths - 1)


def _at(hidden: Tensor, index: Tensor) -> Tensor:
    """Take one token of each sequence: (batch, seqlen, n_embd), (batch,) -> (batch, n_embd)."""
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), index]


def _prompts(owner: str, tokens: Tensor | Sequence[Tensor]) -> tuple[Tensor, Tensor, bool]:
    """Return prompts padded on the right, their lengths, and True if the lengths differ."""
    if isinstance(tokens, Tensor):
        if tokens.dim() != 2 or tokens.shape[1] == 0 or tokens.dtype != torch.int64:
            got = f"{tokens.dtype} {tuple(tokens.shape)}"
            raise ValueError(f"{owner}: tokens must be int64 (batch, seqlen > 0), got {got}")
        return tokens, tokens.new_full(tokens.shape[:1], tokens.shape[1]), False
    if (
        not isinstance(tokens, Sequence)
        or isinstance(tokens, str)
        or not all(isinstance(row, Tensor) for row in tokens)
    ):
        raise TypeError(f"{owner}: tokens must be a Tensor or a list of Tensors, got {type(tokens).__name__}")
    if not tokens:
        raise ValueError(f"{owner}: tokens must have one prompt or more, got none")
    for row in tokens:
        if row.dim() != 1 or row.shape[0] == 0 or row.dtype != torch.int64:
            got = f"{row.dtype} {tuple(row.shape)}"
            raise ValueError(f"{owner}: every prompt must be int64 (seqlen > 0,), got {got}")
    sizes = [row.shape[0] for row in tokens]
    padded = torch.nn.utils.rnn.pad_sequence(list(tokens), batch_first=True)
    return padded, torch.tensor(sizes, device=padded.device), len(set(sizes)) > 1
