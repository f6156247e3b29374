"""Token-statistics self-attention: two token sums (vision), or a recurrence over tokens (language)."""

from __future__ import annotations

import torch
from torch import Tensor


def _softmax_over_heads(logits: list[Tensor]) -> list[Tensor]:
    """Membership of one token in each head: ``Pi_h = exp(l_h) / sum_h' exp(l_h')``."""
    top = max(logit.detach() for logit in logits)
    exps = [(logit - top).exp() for logit in logits]
    return [e / sum(exps) for e in exps]


def tssa_loop(
    w: Tensor,
    temp: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attend through second moments (ToST, vision): ``out_n = -Pi_n w_n / (1 + sum_m Pi_m w_m^2 / S)``.

    ``Pi_n = softmax_h(temp_h sum_d w_n^2 / c)``, ``c = max(sum_m w_m^2, 1e-24)``, ``S = sum_m Pi_m + 1e-8``.
    A padded token leaves both sums over m and still gets an output; no token left: out and Pi 0.
    """
    batch, nheads, seqlen, head_dim = w.shape
    temps = temp.reshape(nheads)
    outs, memberships = [], []
    for b in range(batch):
        kept = [n for n in range(seqlen) if key_padding_mask is None or key_padding_mask[b, n]]
        zero = w.new_zeros(head_dim)
        norms = [sum((w[b, h, n] ** 2 for n in kept), zero).clamp(min=1e-24) for h in range(nheads)]
        pi = [
            _softmax_over_heads([temps[h] * (w[b, h, n] ** 2 / norms[h]).sum() for h in range(nheads)])
            for n in range(seqlen)
        ]
        for h in range(nheads):
            total = sum(pi[n][h] for n in kept) + 1e-8
            moment = sum((pi[n][h] * w[b, h, n] ** 2 for n in kept), zero) / total
            attn = 1 / (1 + moment)
            if keep is not None:
                attn = attn * keep[b, h] / (1 - dropout_p)
            outs += [-w[b, h, n] * pi[n][h] * attn if kept else zero for n in range(seqlen)]
            memberships += [pi[n][h] if kept else w.new_zeros(()) for n in range(seqlen)]
    return torch.stack(outs).view(w.shape), torch.stack(memberships).view(batch, nheads, seqlen)


def tssa_causal_loop(
    w: Tensor,
    temp: Tensor,
    *,
    denom_bias: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attend through running second moments (ToST, language), token by token as decoding does.

    ``Pi_n = softmax_h(temp_h sum_d (w_n^2 / max(cumsum w^2, 1e-12) + denom_bias_n))`` and
    ``out_n = -Pi_n w_n / (1 + cumsum(Pi w^2) / (cumsum Pi + 1e-8))``. The state is the three running sums.
    A padded token leaves them and still gets an output; before the first kept token: out and Pi 0.
    """
    batch, nheads, seqlen, head_dim = w.shape
    temps, heads = temp.reshape(nheads), range(nheads)
    bias = w.new_zeros(nheads, seqlen) if denom_bias is None else denom_bias.reshape(nheads, -1)
    outs, memberships = [], []
    for b in range(batch):
        sum_sq, sum_pi_sq = [w.new_zeros(head_dim)] * nheads, [w.new_zeros(head_dim)] * nheads
        sum_pi, seen = [w.new_zeros(())] * nheads, False
        for n in range(seqlen):
            kept = key_padding_mask is None or bool(key_padding_mask[b, n])
            seen = seen or kept
            sq = [w[b, h, n] ** 2 for h in heads]
            if kept:
                sum_sq = [sum_sq[h] + sq[h] for h in heads]
            pi = _softmax_over_heads(
                [temps[h] * (sq[h] / sum_sq[h].clamp(min=1e-12) + bias[h, n]).sum() for h in heads]
            )
            if kept:
                sum_pi = [sum_pi[h] + pi[h] for h in heads]
                sum_pi_sq = [sum_pi_sq[h] + pi[h] * sq[h] for h in heads]
            attn = [1 / (1 + sum_pi_sq[h] / (sum_pi[h] + 1e-8)) for h in heads]
            if keep is not None:
                attn = [attn[h] * keep[b, h, n] / (1 - dropout_p) for h in heads]
            outs += [-w[b, h, n] * pi[h] * attn[h] if seen else w.new_zeros(head_dim) for h in heads]
            memberships += pi if seen else [w.new_zeros(())] * nheads
    out = torch.stack(outs).view(batch, seqlen, nheads, head_dim).transpose(1, 2)
    return out, torch.stack(memberships).view(batch, seqlen, nheads).transpose(1, 2)
