"""tssa's CUDA kernels under the emulator: where tokens are, what is allocated, what does not fit."""

import pytest
import torch

from crate_kernels import TokenStatsCache, testing
from crate_kernels._core import backends
from crate_kernels.ops.tssa import cuda
from crate_kernels.ops.tssa.call import TSSACall
from crate_kernels.ops.tssa.cuda import passes
from tests.ops.common import FORMS, outputs_and_gradients, over_tolerance
from tests.ops.tssa.common import call, going, temps, tokens


def chunks(w, dout=None, causal=False):
    return cuda.choose(w, dout, TSSACall(), causal)[1].cuts


def test_the_device_decides_where_tokens_are(device):
    """0 chunks is a sequence on chip: in one block's shared memory, or, on sm_90, in that of up to eight."""
    small, vit, wide = (torch.zeros(8, 12, n, d, dtype=torch.bfloat16) for n, d in ((50, 32), (197, 64), (1024, 64)))
    expected = {75: (0, True, True), 80: (0, True, True), 90: (0, False, False)}
    for capability, (fits, vit_in_chunks, wide_in_chunks) in expected.items():
        limit = {75: 64, 80: 163, 90: 227}[capability] * 1024
        device(capability=capability, shared_limit=limit, multiprocessors=16)
        assert chunks(small) == fits
        assert (chunks(vit) > 0) == vit_in_chunks
        assert (chunks(wide) > 0) == wide_in_chunks
    assert chunks(vit, vit) == 0, "w and dout are in two blocks' shared memory each"
    assert chunks(wide, wide) > 0, "of both, eight blocks hold half"
    # One long sequence would keep eight of very many multiprocessors busy, chunks every one.
    device(capability=90, shared_limit=227 * 1024, multiprocessors=132)
    assert chunks(wide[:1]) > 0


REFUSED = {
    "wide": ((2, 16, 5, 256), r"tokens that fit this GPU's shared memory in its forward pass, got .* = 16 \* 256"),
    "no-channels": ((2, 3, 5, 0), r"tokens with channels, got nheads \* head_dim = 3 \* 0"),
    "no-heads": ((2, 0, 5, 16), r"tokens with channels, got nheads \* head_dim = 0 \* 16"),
}


@FORMS
@pytest.mark.parametrize(("shape", "says"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_and_left_to_composite_for_none(shape, says, causal, backend, device, monkeypatch):
    device(shared_limit=8 * 1024)
    inputs = tokens(*shape), temps(shape[1])
    refusal = f"^tssa: backend='{backend}' takes {says}; use backend='composite'"
    with pytest.raises(NotImplementedError, match=refusal):
        call(causal, backend)(*inputs)
    monkeypatch.setattr(backends, "_PREFERENCE", {"cpu": (backend,)})
    expected = outputs_and_gradients(call(causal, "composite"), *inputs)
    torch.testing.assert_close(outputs_and_gradients(call(causal, None), *inputs), expected, rtol=0, atol=0)
    if causal and all(shape):
        caches = [TokenStatsCache(shape[0], shape[1], shape[3]) for _ in range(3)]
        with pytest.raises(NotImplementedError, match=refusal):
            call(causal, backend, cache=caches[0])(*inputs)
        assert not caches[0].lengths.any()
        steps = [call(causal, name, cache=c)(*inputs) for name, c in zip((None, "composite"), caches[1:], strict=True)]
        torch.testing.assert_close(*steps, rtol=0, atol=0)


def test_the_causal_backward_takes_wide_tokens_in_short_chunks(backend, device):
    device(shared_limit=56 * 1024)
    w = tokens(1, 8, 40, 128)
    assert chunks(w, w, causal=True) == 5  # without running sums to keep
    case = testing.Case("tssa", "cuda-wide", (1, 8, 40, 128), {"causal": True})
    assert over_tolerance(case, torch.float32, backend, "cpu") == []
    device(shared_limit=20 * 1024)  # enough for the forward alone
    out, _ = call(True, backend)(w.requires_grad_(), temps(8))
    with pytest.raises(
        NotImplementedError, match="takes tokens that fit this GPU's shared memory in its backward pass"
    ):
        out.sum().backward()


@FORMS
def test_what_a_call_allocates(causal, backend, device, monkeypatch):
    """On chip nothing but the results; in chunks a number a head and token, and sets of sums, 1 / 32 of the tokens."""
    sizes = []
    for owner, name in ((passes, "_empty_sums"), (TSSACall, "empty_membership")):
        allocate = getattr(owner, name)

        def counted(*args, allocate=allocate, **kwargs):
            allocated = allocate(*args, **kwargs)
            sizes.extend([] if allocated is None else [allocated.numel()])
            return allocated

        monkeypatch.setattr(owner, name, counted)
    w, rows = tokens(2, 3, 128, 32), 2 * 3 * 128
    sums = {n: 2 * (n + 1) * 3 * 33 for n in (2, 4)}
    expected = {
        "block": [rows, sums[2], sums[2], rows, 2 * 5 * 3 * 65, sums[4], sums[4]] if causal else [rows],
        "chunks": [rows, sums[4], sums[4], rows, sums[4], sums[4]],
    }
    for way in ("block",) if causal else ("block", "chunks"):
        going(device, way)
        sizes.clear()
        outputs_and_gradients(call(causal, backend), w, temps(3))
        assert sizes == expected[way]
