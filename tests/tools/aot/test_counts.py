"""The launches, library calls and memory that the docstrings of tssa's and ista's Triton kernels claim.

Launchers run on meta tensors, whose launches are recorded; a dispatch mode sees every PyTorch operator beside them.
"""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tools.aot import harness

harness.needs_compiler()

from tests.ops.ista import aot as ista  # noqa: E402
from tests.ops.tssa import aot as tssa  # noqa: E402  # only where Triton compiles

_ALLOCATE = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


class Ledger(TorchDispatchMode):
    """Count operators that compute, and the bytes that are allocated."""

    def __init__(self):
        super().__init__()
        self.calls, self.bytes, self.largest = Counter(), 0, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            name = func.name().partition("::")[2].partition(".")[0]
            if name not in _ALLOCATE:
                self.calls[name] += 1
            if not name.endswith("_") and "out" not in (kwargs or {}):
                self.bytes += result.nbytes
                self.largest[result.nbytes] += 1
        return result


def count(call):
    """Return (launches by kernel, library calls by name, ledger) of ``call`` on an H100."""
    with Ledger() as ledger:
        launches = harness.launches(call, "sm_90")
    return Counter(launch.function.__name__ for launch in launches), dict(ledger.calls), ledger


# Launches and PyTorch operators per call: sums over chunks, dtemp over sequences, no final cast.
CAUSAL_BACKWARD = {"_tssa_causal_bwd_kernel": 5, "_tssa_causal_softmax_bwd_kernel": 1}
TSSA = {
    "whole": (tssa.full(197, 8, 48), {"_tssa_fwd_kernel": 1, "_tssa_bwd_kernel": 3}, {"sum": 3}),  # backward by chunks
    "chunks": (tssa.full(4096, 8, 64, batch=4), {"_tssa_fwd_kernel": 3, "_tssa_bwd_kernel": 3}, {"sum": 5}),
    "causal": (
        tssa.causal(1024, 12, 64, bias=False),
        {"_tssa_causal_fwd_kernel": 3, **CAUSAL_BACKWARD, "_scan_chunks_kernel": 5},
        {"sum": 1},
    ),
    "causal-bias": (
        tssa.causal(1024, 12, 64, backward=True),
        {
            "_tssa_causal_fwd_kernel": 3,
            **CAUSAL_BACKWARD,
            "_scan_chunks_kernel": 5,
            "_tssa_causal_dbias_kernel": 2,
        },
        {"sum": 2, "add_": 1},
    ),
    "causal-bias-fp32": (  # whose DENERGY takes the bias into dtemp
        tssa.causal(1024, 12, 64, dtype=tssa.SINGLE),
        {
            "_tssa_causal_fwd_kernel": 3,
            **CAUSAL_BACKWARD,
            "_scan_chunks_kernel": 5,
            "_tssa_causal_dbias_kernel": 2,
        },
        {"sum": 1},
    ),
    "causal-short": (
        tssa.causal(32, 12, 64, bias=False),
        {"_tssa_causal_fwd_kernel": 1, **CAUSAL_BACKWARD},
        {"sum": 1},
    ),
    "decode": (tssa.decode(1, 12, 64), {"_tssa_causal_fwd_kernel": 1}, {}),
}


@pytest.mark.parametrize(("call", "launches", "library"), TSSA.values(), ids=TSSA)
def test_tssa_launches(call, launches, library):
    counted, calls, _ = count(call)
    assert (counted, calls) == (launches, library)


def test_a_whole_sequence_allocates_its_results_and_two_rows():
    batch, heads, seqlen, head_dim = 256, 8, 197, 48
    tokens, rows, sums = (batch * heads * n for n in (seqlen * head_dim * 2, seqlen * 4, head_dim * 4))
    forward = count(tssa.full(seqlen, heads, head_dim, batch=batch, backward=False))[2].bytes
    assert forward == tokens + rows + 2 * sums
    call = tssa.full(seqlen, heads, head_dim, batch=batch)
    nchunks = harness.launches(call, "sm_90")[1].arguments["nchunks"]
    boundary = batch * heads * (head_dim + 1) * 4 * (nchunks + 1)  # the backward is by chunks
    assert count(call)[2].bytes - forward == tokens + 2 * rows + 2 * boundary + batch * heads * 4 + heads * 4


def test_chunks_allocate_their_sums_beside_the_results():
    batch, heads, seqlen, head_dim = 4, 8, 4096, 64
    call, forward = (tssa.full(seqlen, heads, head_dim, batch=batch, backward=both) for both in (True, False))
    nchunks = harness.launches(call, "sm_90")[0].arguments["nchunks"]
    assert nchunks > 1
    tokens, rows, sums = (batch * heads * n for n in (seqlen * head_dim * 2, seqlen * 4, head_dim * 4))
    boundary = batch * heads * (head_dim + 1) * 4 * (nchunks + 1)  # of each chunk, and of the sequence
    first = count(forward)[2].bytes
    assert first == tokens + rows + 2 * sums + 2 * boundary
    assert count(call)[2].bytes - first == tokens + 2 * rows + 2 * boundary + batch * heads * 4 + heads * 4


@pytest.mark.parametrize("seqlen", [32, 1024], ids=["alone", "chunks"])
def test_the_causal_form_allocates_two_sets_of_sums_and_four_and_marks_backward(seqlen):
    batch, heads, head_dim = 16, 12, 64
    call, forward = (tssa.causal(seqlen, heads, head_dim, batch=batch, backward=both) for both in (True, False))
    first, *_, last = harness.launches(call, "sm_90")
    nchunks, back = first.arguments["nchunks"], seqlen // 32
    assert (nchunks > 1) == (seqlen > 32)
    tokens, rows = (batch * heads * n for n in (seqlen * head_dim * 2, seqlen * 4))
    chunk = batch * heads * (head_dim + 1) * 4
    assert count(forward)[2].bytes == tokens + rows + (2 * chunk * nchunks if nchunks > 1 else 0)
    # dtemp of the chunks and of the bias's blocks; its gradient, also by four parts of the batch; dtemp by blocks.
    by_bias = heads * 4 * ((1 + 4) * seqlen + -(-seqlen // 64) + 1)
    marks = 2 * chunk * back * (32 // 8 - 1)
    assert last.function.__name__ == "_tssa_causal_dbias_kernel"
    both = count(call)[2].bytes - count(forward)[2].bytes
    assert both == tokens + rows + 4 * chunk * back + marks + heads * 4 + by_bias


def test_decoding_allocates_its_results():
    assert count(tssa.decode(1, 12, 64))[2].bytes == 16 * 12 * (64 * 2 + 4)


@pytest.mark.parametrize(
    ("call", "tokens"),
    [(tssa.full(4096, 8, 64, batch=8), 8 * 4096 * 512), (tssa.causal(1024, 12, 64), 16 * 1024 * 768)],
)
def test_no_temporary_has_the_size_of_the_tokens(call, tokens):
    """out and dw are of that size; the sums of chunks and a number a token and head are far below it."""
    ledger = count(call)[2]
    assert ledger.largest[2 * tokens] == 2
    assert all(size < tokens for size in ledger.largest if size != 2 * tokens)


ISTA = {
    # addmm: W - W^T W forward and backward; x^T g'; its passage through K. add: the sum with its transpose.
    "many": (ista.step(12608, 768), {"_ista_product_kernel": 2, "_ista_update_kernel": 1}, {"addmm": 4, "add": 1}),
    "few": (ista.step(197, 768), {"_ista_product_kernel": 5, "_ista_update_kernel": 1}, {"addmm": 1, "addmm_": 1}),
    # The library computes each product. An elementwise kernel follows each, except the sums over tokens.
    "fp32": (ista.step(12608, 768, ista.SINGLE), {"_ista_update_kernel": 3}, {"addmm": 4 + 2, "add": 1}),
    # Two steps. Forward: three products and the decoder. Backward: four products and four sums over tokens.
    "overcomplete": (
        ista.overcomplete(12608, 384, 1536),
        {"_ista_product_kernel": 3 + 4},
        {"mm": 1, "addmm": 2, "addmm_": 2},
    ),
    # The library computes sums over 3072 channels, one forward and two backward. All but dr add to another tensor.
    "overcomplete-wide": (
        ista.overcomplete(12608, 768, 3072),
        {"_ista_product_kernel": 3 + 4},
        {"mm": 1, "addmm": 2, "addmm_": 2},
    ),
}


@pytest.mark.parametrize(("call", "launches", "library"), ISTA.values(), ids=ISTA)
def test_ista_launches(call, launches, library):
    counted, calls, _ = count(call)
    assert (counted, calls) == (launches, library)


# Tensors of the tokens' size: y, dx and g'; in the two-product form also r forward and backward, and dr. Tensors of
# the weight's size: K forward and backward, dK, its sum with its transpose and dW; in the two-product form only dW.
@pytest.mark.parametrize(("count_tokens", "tokens", "weights"), [(12608, 3, 5), (197, 6, 1)], ids=["many", "few"])
def test_ista_allocates_nothing_else(count_tokens, tokens, weights):
    ledger = count(ista.step(count_tokens, 768))[2]
    sizes = 2 * count_tokens * 768, 2 * 768 * 768
    assert [ledger.largest[size] for size in sizes] == [tokens, weights]
    assert ledger.bytes - tokens * sizes[0] - weights * sizes[1] < 16  # what a library product adds nothing to


def test_a_float32_stream_is_rounded_on_its_way_to_the_product():
    """Of the tokens' size there are y and dx, and for the sum over tokens their 16-bit copy and the masked gradient."""
    largest = count(ista.step(12608, 576, ista.SINGLE, ista.HALF))[2].largest
    assert (largest[4 * 12608 * 576], largest[2 * 12608 * 576]) == (2, 2)


def test_codes_are_written_where_they_are_kept():
    """Codes and residuals, and back their gradients: nothing is stacked or copied."""
    tokens, dim, hidden = 12608, 384, 1536
    largest = count(ista.overcomplete(tokens, dim, hidden))[2].largest
    assert largest[2 * 2 * tokens * hidden] == 1  # both codes
    assert largest[2 * tokens * hidden] == 2  # the gradient of each
    assert largest[2 * tokens * dim] == 4  # out, the one residual and its gradient, dx
