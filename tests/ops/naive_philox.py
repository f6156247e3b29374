"""Philox4x32-10 in Python integers: the generator behind every backend's dropout mask."""

from __future__ import annotations

_WORD = (1 << 32) - 1


def philox4x32_10(counter: tuple[int, int, int, int], key: int) -> tuple[int, int, int, int]:
    """Return the four 32-bit words of one Philox block (Salmon et al., 2011).

    ``key`` has 64 bits (a negative one counts in two's complement); word 0 is its low half.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key & _WORD, (key >> 32) & _WORD
    for _ in range(10):
        left, right = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = ((right >> 32) ^ c1 ^ k0, right & _WORD, (left >> 32) ^ c3 ^ k1, left & _WORD)
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3
