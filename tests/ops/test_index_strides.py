"""Offsets, masks, lengths and caches may have any strides, and masks any bytes, on every backend."""

import pytest
import torch

from crate_kernels import ista, ista_overcomplete, mssa, tssa
from tests.ops.common import FORMS, TURNS, backends, offsets, outputs_and_gradients, padding, randn, seldom
from tests.ops.decoding import attend, calls, contents, new_cache, tokens

BATCH, HEADS, SEQLEN, HEAD_DIM = 3, 3, 12, 8
LENGTHS = (5, 0, 20, 11)  # packed sequences


def column(t):
    """Return ``t`` as a column of a table, whose other entries are far from right."""
    other = ~t if t.dtype == torch.bool else 7 - 3 * t
    return torch.stack([t, other], -1)[..., 0]


STRIDES = {"column": column, "transposed-column": lambda t: column(t.mT).mT if t.dim() > 1 else column(t)}
STRIDED = pytest.mark.parametrize("lay", seldom(STRIDES, "transposed-column"))
EACH = pytest.mark.parametrize(("op", "backend", "device"), calls(reference=True))


ATTENTIONS = pytest.mark.parametrize(
    ("op", "backend", "device"),
    [pytest.param(op, *p.values, id=f"{op}-{p.id}", marks=p.marks) for op in ("mssa", "tssa") for p in backends(op)],
)


def expanded(t):
    """Repeat the first of several sequences, heads or floats: offsets would be those of nothing."""
    return t[:1].expand(t.shape) if t.dim() > 1 or t.is_floating_point() else column(t)


@TURNS
@pytest.mark.parametrize("lay", seldom({**STRIDES, "expanded": expanded}, "transposed-column"))
@FORMS
@pytest.mark.parametrize("packed", [False, True], ids=["mask", "offsets"])
@ATTENTIONS
def test_masks_offsets_and_parameters(op, backend, device, packed, causal, lay):
    w = randn(*((sum(LENGTHS), HEADS) if packed else (BATCH, HEADS, SEQLEN)), HEAD_DIM, device=device).float()
    temp, bias = 1 + 0.1 * randn(HEADS, device=device).float(), 0.1 * randn(HEADS, 20, device=device).float()

    def call(laid):
        options = {"key_padding_mask": laid(padding("right", BATCH, SEQLEN).to(device))}
        if packed:
            options = {"cu_seqlens": laid(offsets(LENGTHS).to(device)), "max_seqlen": max(LENGTHS)}
        options |= {"causal": causal, "backend": backend}
        if op == "mssa":
            return lambda w: mssa(w, return_lse=True, **options)
        options |= {"denom_bias": laid(bias)} if causal else {}
        return lambda w: tssa(w, laid(temp), return_membership=True, **options)

    expected = outputs_and_gradients(call(lambda t: lay(t).contiguous()), w)
    torch.testing.assert_close(outputs_and_gradients(call(lay), w), expected, rtol=0, atol=0)


def large_bytes(mask):
    """Return the same mask with 255 for True: a view of bytes as bool."""
    return (mask.to(torch.uint8) * 255).view(torch.bool)


@TURNS
@FORMS
@pytest.mark.parametrize("keep", seldom(["right", "scattered"], "scattered"))
@ATTENTIONS
def test_any_byte_of_a_mask_but_zero_is_true(op, backend, device, keep, causal):
    w, mask = randn(BATCH, HEADS, SEQLEN, HEAD_DIM, device=device).float(), padding(keep, BATCH, SEQLEN).to(device)
    attention = mssa if op == "mssa" else lambda w, **options: tssa(w, torch.ones(HEADS, device=device), **options)
    expected, found = (
        outputs_and_gradients(lambda w, m=m: attention(w, causal=causal, key_padding_mask=m, backend=backend), w)
        for m in (mask, large_bytes(mask))
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@EACH
def test_any_byte_of_a_mask_but_zero_keeps_a_new_token(op, backend, device):
    results, mask = [], torch.arange(5, device=device) < torch.tensor([[5], [1], [3]], device=device)
    for keep in (mask, large_bytes(mask)):
        cache = new_cache(op, device=device)
        results.append([*attend(op, tokens(5, device=device), backend, cache, keep), *contents(cache)])
    torch.testing.assert_close(*results, rtol=0, atol=0)


@TURNS
@STRIDED
@EACH
@pytest.mark.parametrize(
    "blocks", seldom({"steps": [1, 1], "blocks": [7, 5], "long-blocks": [9, 3]}, "steps", "blocks")
)
def test_caches(op, backend, device, blocks, lay):
    """A user may store a cache's tensors in other tables."""
    results = []
    for laid in (lambda t: t, lay):
        cache, results_of_steps = new_cache(op, device=device), []
        for name in ("data", "lengths") if op == "mssa" else ("energy", "weighted", "mass", "lengths"):
            setattr(cache, name, laid(getattr(cache, name)))
        for step, seqlen in enumerate(blocks):
            mask = torch.arange(seqlen) < torch.tensor([[seqlen], [seqlen], [max(seqlen - 2, 1)]])
            mask = laid(mask.to(device)) if step else None
            results_of_steps += attend(op, tokens(seqlen, device=device, seed=step), backend, cache, mask)
        results.append([*results_of_steps, *contents(cache)])
    # PyTorch may multiply strided keys in another order.
    torch.testing.assert_close(*results)


@STRIDED
@EACH
def test_indices_of_a_cache(op, backend, device, lay):
    results = []
    for laid in (lambda t: t, lay):
        cache = new_cache(op, device=device)
        attend(op, tokens(4, device=device), backend, cache)
        cache.reorder(laid(torch.tensor([2, 0, 2], device=device)))
        if op == "mssa":
            cache.truncate(laid(torch.tensor([1, 4, 2], device=device)))
        results.append([*attend(op, tokens(1, device=device, seed=1), backend, cache), *contents(cache)])
    torch.testing.assert_close(*results, rtol=0, atol=0)


@STRIDED
@pytest.mark.parametrize(("backend", "device"), backends("ista"))
def test_dictionaries(backend, device, lay):
    x = randn(20, 8, device=device).float()
    square, wide, decoder = (randn(8, n, seed=n, device=device).float() / 3 for n in (8, 20, 21))

    def run(laid):
        return [
            *outputs_and_gradients(lambda x, w: ista(x, laid(w), backend=backend), x, square),
            *outputs_and_gradients(
                lambda x, w, d: ista_overcomplete(x, laid(w), laid(d), backend=backend), x, wide, decoder[:, 1:]
            ),
        ]

    torch.testing.assert_close(run(lay), run(lambda t: t))
