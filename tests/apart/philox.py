"""Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), and dropout made of it."""

import math

import numpy as np
import torch

_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)  # table 2 of the paper
_WEYL = 0x9E3779B9, 0xBB67AE85  # the golden ratio and sqrt(3) - 1, as 32-bit fractions
_WORD = 2**32
_LOW = np.uint64(_WORD - 1)
_HIGH = np.uint64(32)


def philox(counter, key):
    """Return the four words of one block of random numbers; the words of ``counter`` may be arrays."""
    r0, l0, r1, l1 = np.broadcast_arrays(*(np.asarray(word, dtype=np.uint64) for word in counter))
    for turn in range(10):
        k0, k1 = (np.uint64((k + turn * w) % _WORD) for k, w in zip(key, _WEYL, strict=True))
        first, second = _MULTIPLIERS[0] * r0, _MULTIPLIERS[1] * r1
        r0, l0, r1, l1 = (second >> _HIGH) ^ l0 ^ k0, second & _LOW, (first >> _HIGH) ^ l1 ^ k1, first & _LOW
    return r0, l0, r1, l1


def factor(seed, p, heads, rows, columns):
    """Return the dropout factors, 0 or 1 / (1 - p), of positions (head, row, column) as float64."""
    word = philox((columns, rows, heads, 0), (seed % _WORD, seed // _WORD))[0]
    kept = word >= np.uint64(math.ceil(p * _WORD))
    return torch.from_numpy(kept.astype(np.float64)) / (1 - p)


def next_seed():
    """Return the dropout seed that the next call will draw from torch's generator, and leave the generator as it is."""
    state = torch.get_rng_state()
    seed = int(torch.randint(0, 2**63 - 1, (), dtype=torch.int64))
    torch.set_rng_state(state)
    return seed


def attention_factor(seed, p, first, shape):
    """Return the factors on attention weights, (batch, nheads, seqlen, seqlen); ``first`` is the first batch row."""
    batch, nheads, seqlen, _ = shape
    heads = np.arange(first * nheads, (first + batch) * nheads).reshape(batch, nheads, 1, 1)
    position = np.arange(seqlen)
    return factor(seed, p, heads, position[:, None], position)


def statistics_factor(seed, p, first, shape, causal):
    """Return the factors on 1 / (1 + M): one for a channel, or for an element in the causal form."""
    batch, nheads, seqlen, head_dim = shape
    heads = np.arange(first * nheads, (first + batch) * nheads).reshape(batch, nheads, 1, 1)
    rows = np.arange(seqlen if causal else 1)[:, None]
    return factor(seed, p, heads, rows, np.arange(head_dim))


def skip():
    """Draw from torch's generator what a call draws for its seed."""
    torch.randint(0, 2**63 - 1, (), dtype=torch.int64)
