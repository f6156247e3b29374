"""The papers' equations, in the order in which the published eager code computes them, for any dtype.

In float64 they are the truth; in the dtype of a call they are the eager code whose error a kernel may have. Gradients
come from autograd. ``nudge`` moves the threshold of what is discontinuous, as a share of what is compared with it: how
far a result jumps there is no error.
"""

import itertools

import torch


def per_sequence(function, w, bounds):
    """Apply ``function(w, index)`` to every packed sequence as a batch of one, and pack what it returns again."""
    parts = [function(w[a:b].transpose(0, 1)[None], i) for i, (a, b) in enumerate(itertools.pairwise(bounds))]
    out = torch.cat([out[0].transpose(0, 1) for out, _ in parts])
    return out, None if parts[0][1] is None else torch.cat([second[0] for _, second in parts], -1)


def mssa(w, *, causal=False, scale, factor=None, phi="softmax", threshold=None, mask=None, nudge=0.0):
    """CRATE Eq. 11-12: out = phi(softmax(scale w w^T)) w and the logsumexp of the scores, (batch, nheads, seqlen)."""
    seqlen = w.shape[2]
    allowed = torch.ones(seqlen, seqlen, dtype=torch.bool)
    allowed = (allowed.tril() if causal else allowed)[None, None]
    if mask is not None:
        allowed = allowed & mask[:, None, None, :]
    out, lse = attend(w, w, allowed, scale=scale, factor=factor, phi=phi, threshold=threshold, nudge=nudge)
    if lse is not None:  # of tokens that are no numbers it is none either, even where every score is -inf
        lse = lse + (w * 0).sum((1, 2, 3), dtype=lse.dtype)[:, None, None]
    return out, lse


def attend(queries, w, allowed, *, scale, factor=None, phi="softmax", threshold=None, nudge=0.0):
    """Attend from ``queries`` over the tokens ``w`` where ``allowed``; a query without a key gives 0 and -inf."""
    scores = (queries @ w.transpose(-1, -2)) * scale
    if phi in ("relu", "identity"):
        weights = _relu(scores, nudge) if phi == "relu" else scores
        lse = None
    else:
        some = allowed.any(-1, keepdim=True)
        # Rows without a key are computed from zeros and masked afterwards: softmax of nothing is NaN, its gradient too.
        open_scores = scores.masked_fill(~allowed, -torch.inf).masked_fill(~some, 0.0)
        weights = open_scores.softmax(-1)
        lse = open_scores.logsumexp(-1).masked_fill(~some.squeeze(-1), -torch.inf)
        if phi == "threshold":
            # The rounding of a probability grows with the scores that it is made of.
            height = threshold * (1 + nudge * (1 + _largest(open_scores))) if nudge else threshold
            weights = (weights > height).to(w.dtype) * threshold
    weights = weights.masked_fill(~allowed, 0.0)
    if factor is not None:
        weights = weights * factor.to(w.dtype)
    return weights @ w, lse


def _largest(scores):
    """Return the largest finite score, as it is without its sign."""
    finite = scores.detach()[scores.isfinite()].abs()
    return finite.max() if finite.numel() else 0.0


def _floor(value, dtype):
    """Return the published floor, or the smallest normal number where the dtype would round it to 0."""
    return max(value, torch.finfo(dtype).tiny)


def running_sums(x):
    """Return the sums up to each token, of float64 by doubling, so that a sum of n tokens rounds log2(n) times.

    ``cumsum`` rounds n times: of 30,000 tokens, in float64, by more than float32's error 29 bits further down, because
    PyTorch adds float32 up in float64.
    """
    if x.dtype != torch.float64:
        return x.cumsum(2)
    step = 1
    while step < x.shape[2]:
        x = torch.cat([x[:, :, :step], x[:, :, step:] + x[:, :, :-step]], 2)
        step *= 2
    return x


def tssa(w, temp, *, factor=None, mask=None):
    """ToST's vision form: sums over all tokens; returns (out, membership)."""
    squares = w.square()
    kept = (
        torch.ones(w.shape[0], 1, w.shape[2], 1, dtype=w.dtype) if mask is None else mask[:, None, :, None].to(w.dtype)
    )
    energy = (squares * kept).sum(2, keepdim=True).clamp_min(_floor(1e-24, w.dtype))
    membership = (temp.reshape(-1, 1) * (squares / energy).sum(-1)).softmax(1)
    weights = membership[..., None] * kept
    moment = (weights * squares).sum(2, keepdim=True) / (weights.sum(2, keepdim=True) + 1e-8)
    gate = 1 / (1 + moment)
    gate = gate if factor is None else gate * factor.to(gate.dtype)
    out = -w * membership[..., None] * gate
    if mask is not None:
        nothing = ~mask.any(1)[:, None, None]
        out, membership = out.masked_fill(nothing[..., None], 0.0), membership.masked_fill(nothing, 0.0)
    return out.to(w.dtype), membership


def tssa_causal(w, temp, bias=None, *, factor=None, mask=None):
    """ToST's language form: running sums, a bias of the position in every channel; returns (out, membership)."""
    squares = w.square()
    kept = (
        torch.ones(w.shape[0], 1, w.shape[2], 1, dtype=w.dtype) if mask is None else mask[:, None, :, None].to(w.dtype)
    )
    ratio = squares / running_sums(squares * kept).clamp_min(_floor(1e-12, w.dtype))
    if bias is not None:
        ratio = ratio + bias.reshape(bias.shape[0], -1)[:, : w.shape[2], None]
    membership = (temp.reshape(-1, 1) * ratio.sum(-1)).softmax(1)
    weights = membership[..., None] * kept
    moment = running_sums(weights * squares) / (running_sums(weights) + 1e-8)
    gate = 1 / (1 + moment)
    gate = gate if factor is None else gate * factor.to(gate.dtype)
    out = -w * membership[..., None] * gate
    if mask is not None:
        nothing = (mask.cumsum(1) == 0)[:, None]
        out, membership = out.masked_fill(nothing[..., None], 0.0), membership.masked_fill(nothing, 0.0)
    return out.to(w.dtype), membership


def ista(x, weight, *, step_size=0.1, lambd=0.1, nonnegative=True, nudge=0.0):
    """CRATE's sparse coding step as its code has it: three products, then the threshold."""
    gradient = x @ weight - (x @ weight.T) @ weight
    v = x + step_size * gradient
    height = step_size * lambd
    if nonnegative:
        return _relu(v - height, nudge)
    return v.sign() * _relu(v.abs() - height, nudge)


def ista_overcomplete(x, weight, decoder=None, *, step_size=0.1, lambd=0.1, steps=2, nudge=0.0):
    """CRATE-alpha's block: proximal steps from zero in an overcomplete dictionary, then the decoder."""
    z = torch.zeros(*x.shape[:-1], weight.shape[1], dtype=x.dtype)
    for _ in range(steps):
        residual = x - z @ weight.T
        z = _relu(z + step_size * (residual @ weight) - step_size * lambd, nudge)
    return z @ (weight if decoder is None else decoder).T


def _relu(v, nudge):
    return torch.where(v > nudge * v.detach().abs().max(), v, 0.0) if nudge and v.numel() else v.relu()
