"""tssa's kernels on a GPU: long sequences, huge tensors, streams, graphs, repeatability."""

import pytest
import torch

from crate_kernels import TokenStatsCache, testing, tssa
from tests.gpu.common import DTYPES, HALF, captured, check_equal, no_waiting, on_a_busy_stream, tokens
from tests.gpu.fixtures import DEVICE, DRY, backend, exact_products  # noqa: F401
from tests.ops.common import FORMS, over_tolerance

pytestmark = pytest.mark.exhaustive  # where there is no GPU; make gpu runs all of them


def cases():
    """List named cases: what models have, and lengths on either side of every way to launch."""
    shapes = {
        "tiny": (8, 4, 196, 48),
        "small": (200, 8, 197, 48),
        "small-few": (2, 8, 785, 48),
        "large": (4, 16, 1025, 48),
        "wide": (2, 20, 1024, 64),
        "long": (1, 12, 25600, 64),
        "odd": (3, 5, 2047, 88),
    }
    half = 40 if DRY else 3000
    for causal in (False, True):
        options, form = {"causal": causal, "return_membership": True}, "causal-" if causal else ""
        for name, shape in shapes.items():
            shape = (min(shape[0], 2), min(shape[1], 5), shape[2] % 67 + 30, min(shape[3], 48)) if DRY else shape
            yield testing.Case("tssa", f"{form}gpu-{name}", shape, options)
        dropout = {**options, "dropout_p": 0.2}
        lengths = {"lengths": (half, 7, 2 * half, 0, 129)}
        yield testing.Case("tssa", f"{form}packed-long", (0, 6, 0, 64), dropout, **lengths)
        yield testing.Case("tssa", f"{form}padded-long", (2, 6, half, 64), dropout, padding="scattered")
        yield testing.Case("tssa", f"{form}mixed-norms-long", (1, 6, half, 64), options, special="mixed norms")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_is_within_tolerance(case, dtype, backend):
    assert over_tolerance(case, dtype, backend, DEVICE) == []


def differentiate(backend, w, **options):
    w, temp = w.detach().requires_grad_(), torch.linspace(0.8, 1.2, w.shape[-3], device=w.device).requires_grad_()
    out, membership = tssa(w, temp, return_membership=True, backend=backend, **options)
    upstream = torch.linspace(-1, 1, out.numel(), device=w.device).view(out.shape).to(out.dtype)
    grads = torch.autograd.grad([out, membership], [w, temp], [upstream, torch.sin(9 * membership.detach())])
    return out.detach(), membership.detach(), *grads


@FORMS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seqlen", [70, 71] if DRY else [197, 4095])
def test_gives_the_same_bits_twice(seqlen, dtype, causal, backend):
    w = tokens(2, 3, seqlen, 64, dtype=dtype)
    check_equal(differentiate(backend, w, causal=causal), differentiate(backend, w, causal=causal))


@FORMS
@pytest.mark.parametrize("layout", ["tokens", "batch"])
def test_addresses_more_than_two_billion_elements(layout, causal, backend):
    """The last elements lie past 2^31: of one sequence, whose last tokens see all, or of a batch."""
    heads, width = (3, 16) if DRY else (16, 64)
    many = 40 if DRY else 2**31 // (heads * width) + 128
    batch, seqlen = (1, many) if layout == "tokens" else (-(-many // 64), 64)
    w, temp = tokens(batch, heads, seqlen, width), torch.ones(heads, device=DEVICE)
    assert DRY or w.numel() > 2**31
    out, membership = tssa(w, temp, causal=causal, return_membership=True, backend=backend)
    assert membership[-1].sum(0).sub(1).abs().max() < 1e-5
    if layout == "batch":
        exact = tssa(w[-1:].double(), temp.double(), causal=causal, backend="reference")
        assert (out[-1:].double() - exact).abs().max() < 8 * torch.finfo(HALF).eps * exact.abs().max()
        return
    # The moments at the last token are sums over all tokens, here in float64 by slices.
    moment, mass = 0.0, 0.0
    for part, members in zip(w.split(1 << 16, 2), membership.split(1 << 16, 2), strict=True):
        moment = moment + (members.double().unsqueeze(-1) * part.double().square()).sum(2)
        mass = mass + members.double().sum(2)
    exact = -w[:, :, -1].double() * membership[:, :, -1, None].double() / (1 + moment / mass.unsqueeze(-1))
    assert (out[:, :, -1].double() - exact).abs().max() < 8 * torch.finfo(HALF).eps * exact.abs().max()


@FORMS
def test_runs_on_the_current_stream(causal, backend):
    w = tokens(2, 3, 65, 64)
    check_equal(
        on_a_busy_stream(lambda x: differentiate(backend, x, causal=causal), w),
        differentiate(backend, w, causal=causal),
    )


@FORMS
@pytest.mark.parametrize("shape", [(2, 3, 65, 64), (1, 3, 100 if DRY else 5000, 64)], ids=["whole", "chunks"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3], ids=["plain", "dropout"])
def test_forward_and_backward_replay_as_a_graph(dropout_p, shape, causal, backend):
    w = tokens(*shape)
    replay = captured(lambda: differentiate(backend, w, causal=causal, dropout_p=dropout_p))
    for seed in (1, 2):
        w.copy_(tokens(*shape, seed=seed))
        actual = [t.clone() for t in replay()]
        assert all(t.isfinite().all() for t in actual)
        if not dropout_p:  # whose seed advances from replay to replay
            check_equal(actual, differentiate(backend, w, causal=causal))


def test_decoding_replays_as_a_graph(backend):
    """Step by step the bits of decoding without a graph, outputs and state."""
    steps = 3 if DRY else 300
    w, temp = tokens(2, 3, steps + 1, 64), torch.ones(3, device=DEVICE)
    token = w[:, :, :1].clone()

    def first_step():
        cache = TokenStatsCache(2, 3, 64, device=DEVICE)

        def step():
            return tssa(token, temp, causal=True, cache=cache, backend=backend)

        step()
        return cache, step

    (cache, step), (own, advance) = first_step(), first_step()
    copies = [t.clone() for t in cache._tensors()]
    replay = captured(step)
    for state, before in zip(cache._tensors(), copies, strict=True):
        state.copy_(before)
    for number in range(1, steps + 1):
        token.copy_(w[:, :, number : number + 1])
        check_equal([replay()], [advance()])
    check_equal(cache._tensors(), own._tensors())
    assert cache.lengths.tolist() == [steps + 1] * 2


def test_never_waits_for_the_device(backend):
    w, temp, cache = tokens(2, 3, 65, 64), torch.ones(3, device=DEVICE), TokenStatsCache(2, 3, 64, device=DEVICE)
    offsets = torch.tensor([0, 30, 65], dtype=torch.int32, device=DEVICE)
    mask = torch.ones(2, 65, dtype=torch.bool, device=DEVICE)

    def calls():
        for causal in (False, True):
            differentiate(backend, w, causal=causal)
            differentiate(backend, w, causal=causal, key_padding_mask=mask, dropout_p=0.1)
            packed = w[0].transpose(0, 1)
            tssa(packed, temp, causal=causal, cu_seqlens=offsets, max_seqlen=35, backend=backend)
        for part in (w, w[:, :, :1]):
            tssa(part, temp, causal=True, cache=cache, backend=backend)

    calls()  # compiling may wait
    with no_waiting():
        calls()


def test_runs_on_the_tensors_device(backend):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: make gpu where there are")
    w = tokens(2, 3, 65, 64)
    check_equal([t.to(w.device) for t in differentiate(backend, w.to("cuda:1"))], differentiate(backend, w))
