"""mssa's kernels on a GPU: long sequences, huge tensors, streams, graphs, repeatability."""

import pytest
import torch
import torch._dynamo.testing

from crate_kernels import SubspaceCache, mssa, testing
from crate_kernels._core import plan
from tests.gpu.common import DTYPES, HALF, captured, check_equal, no_waiting, on_a_busy_stream, tokens
from tests.gpu.fixtures import DEVICE, DRY, backend, exact_products  # noqa: F401
from tests.ops.common import FORMS, over_tolerance
from tests.ops.mssa import ranges

pytestmark = pytest.mark.exhaustive  # where there is no GPU; make gpu runs all of them

MANY = (2, 3, 65, 64) if DRY else (32, 12, 197, 64)  # heads enough for one program each


def cases():
    """List named cases: what models have, and lengths that are no multiple of any tile."""
    shapes = {
        "vit": (8, 12, 197, 64),
        "vit-batch": (32, 12, 197, 64),
        "vit-batch-48": (32, 12, 256, 48),
        "vit-48": (4, 12, 785, 48),
        "long-64": (1, 4, 4096, 64),
        "long-128": (1, 4, 4097, 128),
        "wide-256": (1, 2, 2049, 256),
        "longer-80": (1, 1, 10007, 80),
    }
    for name, shape in shapes.items():
        shape = (min(shape[0], 2), min(shape[1], 2), shape[2] % 67 + 30, min(shape[3], 80)) if DRY else shape
        for causal in (False, True):
            options = {"causal": causal, "return_lse": True}
            yield testing.Case("mssa", f"{'causal-' if causal else ''}{name}", shape, options)
    half = 40 if DRY else 3000
    yield testing.Case("mssa", "packed-long", (0, 3, 0, 64), {"return_lse": True}, lengths=(half, 7, 2 * half, 0, 129))
    yield testing.Case("mssa", "padded-long", (2, 3, half, 64), {"return_lse": True}, padding="scattered")
    yield testing.Case("mssa", "dropout-long", (1, 2, half, 64), {"dropout_p": 0.2, "return_lse": True})
    yield testing.Case("mssa", "mixed-norms-long", (1, 2, half, 64), {"return_lse": True}, special="mixed norms")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_is_within_tolerance(case, dtype, backend):
    assert over_tolerance(case, dtype, backend, DEVICE) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ranges.CASES)
def test_ranges_together_are_the_whole_operator(name, dtype, backend):
    case = ranges.CASES[name]
    if not DRY:
        case = case._replace(cuts=tuple((31 * first, 31 * stop) for first, stop in case.cuts), head_dim=64)
    assert ranges.over_tolerance(case, dtype, backend, DEVICE) == []


def differentiate(backend, w, **options):
    w = w.detach().requires_grad_()
    out, lse = mssa(w, return_lse=True, backend=backend, **options)
    upstream = torch.linspace(-1, 1, out.numel(), device=w.device).view(out.shape).to(out.dtype)
    (dw,) = torch.autograd.grad([out, lse], w, [upstream, torch.ones_like(lse)])
    return out.detach(), lse.detach(), dw


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [MANY, (2, 3, 70 if DRY else 1023, 64)], ids=["short", "long"])
@FORMS
def test_gives_the_same_bits_twice(causal, shape, dtype, backend):
    w = tokens(*shape, dtype=dtype)
    check_equal(differentiate(backend, w, causal=causal), differentiate(backend, w, causal=causal))


@pytest.mark.parametrize("layout", ["heads", "batch"])
def test_addresses_more_than_two_billion_elements(layout, backend):
    """The last elements lie past 2^31 elements, and the heads past what a grid's other sides can number."""
    heads, rows, width = (3, 5, 16) if DRY else (16, 65, 64)
    many = 4 if DRY else 2**31 // (heads * rows * width) + 64
    shape = (many, heads, rows, width) if layout == "batch" else (heads, many, rows, width)
    w = tokens(*shape)
    assert DRY or w.numel() > 2**31
    out, lse, dw = differentiate(backend, w)
    for index in (0, shape[0] // 2, shape[0] - 1):
        part = w[index : index + 1, -2:]
        upstream = torch.linspace(-1, 1, out.numel(), device=w.device).view(out.shape)[index : index + 1, -2:]
        leaf = part.detach().double().requires_grad_()
        exact_out, exact_lse = mssa(leaf, return_lse=True, backend="reference")
        exact = torch.autograd.grad(
            [exact_out, exact_lse], leaf, [upstream.to(w.dtype).double(), torch.ones_like(exact_lse)]
        )
        names = ("out", "lse", "dw")
        actual = dict(zip(names, (t[index : index + 1, -2:] for t in (out, lse, dw)), strict=True))
        exact = dict(zip(names, (exact_out.detach(), exact_lse.detach(), *exact), strict=True))
        measured = testing.measure(actual, exact, exact, w.dtype)
        assert [m for m in measured if m.error > 8 * torch.finfo(w.dtype).eps * exact[m.output].abs().max()] == []


def test_runs_on_the_current_stream(backend):
    w = tokens(2, 3, 65, 64)
    check_equal(on_a_busy_stream(lambda late: differentiate(backend, late), w), differentiate(backend, w))


@pytest.mark.parametrize("shape", [MANY, (2, 3, 70 if DRY else 300, 64)], ids=["short", "long"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"dropout_p": 0.3}], ids=["full", "causal", "dropout"])
def test_forward_and_backward_replay_as_a_graph(options, shape, backend):
    w = tokens(*shape)
    replay = captured(lambda: differentiate(backend, w, **options))
    for seed in (1, 2):
        w.copy_(tokens(*shape, seed=seed))
        actual = [t.clone() for t in replay()]
        assert all(t.isfinite().all() for t in actual)
        if "dropout_p" not in options:  # whose seed advances from replay to replay
            check_equal(actual, differentiate(backend, w, **options))


@pytest.fixture
def repeated(backend):
    """Return a backend whose calls leave plans, once they were dropped; afterwards, plans must have run."""
    plan.forget()
    before = plan.counts()[0]
    yield backend
    assert DRY or not plan.available() or backend != "triton" or plan.counts()[0] > before


@pytest.mark.parametrize("before", [1, 3], ids=["recorded", "repeated"])
def test_a_plan_is_captured(before, repeated):
    w = tokens(*MANY)
    replay = captured(lambda: differentiate(repeated, w), before)
    w.copy_(tokens(*MANY, seed=1))
    check_equal(replay(), differentiate(repeated, w))


def test_a_plan_runs_on_the_current_stream(repeated):
    w = tokens(2, 3, 65, 64)
    for _ in range(3):
        expected = differentiate(repeated, w)
    check_equal(on_a_busy_stream(lambda late: differentiate(repeated, late), w), expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_plan_runs_on_the_device_of_its_tensors(repeated):
    w = tokens(2, 3, 65, 64)
    for device in ("cuda:0", "cuda:1") * 3:
        found = differentiate(repeated, w.to(device))
        assert {t.device for t in found} == {torch.device(device)}
        check_equal([t.to(w.device) for t in found], differentiate(repeated, w))


@pytest.mark.parametrize("stretches", ["one", "several"])
def test_decoding_replays_as_a_graph_while_sequences_grow(stretches, backend):
    """Each step gives the bits of a step that is launched; a graph keeps the stretches it was captured with."""
    steps = 3 if DRY else 300
    w = tokens(2, 3, steps + 3, 64)
    cache = SubspaceCache(2, 3, steps + 3, 64, dtype=w.dtype, device=DEVICE)
    token = w[:, :, :1].clone()
    mssa(token, causal=True, cache=cache, backend=backend)
    copy = cache.clone()
    bound = 1 if stretches == "one" else steps

    def step(cache):
        cache._bound = bound  # whose stretches are chosen on the host
        return mssa(token, causal=True, cache=cache, backend=backend)

    replay = captured(lambda: step(cache))
    for own, before in ((cache.data, copy.data), (cache.lengths, copy.lengths)):
        own.copy_(before)
    for number in range(1, steps + 1):
        token.copy_(w[:, :, number : number + 1])
        assert torch.equal(replay(), step(copy))
    assert cache.lengths.tolist() == [steps + 1] * 2
    assert torch.equal(cache.data[:, :, : steps + 1], w[:, :, : steps + 1])


def test_compiles_once_for_every_length(backend):
    """Whatever form a length takes is chosen inside the op: heads enough for the pair form, and lengths beyond it."""

    def loss(w):
        out, lse = mssa(w, return_lse=True, backend=backend)
        return out.float().square().sum() + lse.sum()

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    for seqlen in (33, 65, 80) if DRY else (197, 256, 300, 1024):
        leaf, other = (tokens(*MANY[:2], seqlen, 64).requires_grad_() for _ in range(2))
        torch._dynamo.mark_dynamic(leaf, 2)
        compiled(leaf).backward()
        loss(other).backward()
        assert torch.equal(leaf.grad, other.grad)
    assert counter.frame_count == 1


def test_computes_in_the_autocast_dtype(backend):
    w = tokens(*MANY, dtype=torch.float32)
    with torch.autocast(DEVICE, dtype=HALF):
        actual = differentiate(backend, w)
    expected = differentiate(backend, w.to(HALF))
    check_equal(actual[:2], expected[:2])
    assert torch.equal(actual[2].to(HALF), expected[2])


def test_never_waits_for_the_device(backend):
    w, cache = tokens(2, 3, 65, 64), SubspaceCache(2, 3, 66, 64, dtype=HALF, device=DEVICE)
    offsets = torch.tensor([0, 30, 65], dtype=torch.int32, device=DEVICE)
    mask = torch.ones(2, 65, dtype=torch.bool, device=DEVICE)

    def calls():
        differentiate(backend, w)
        differentiate(backend, w, causal=True, key_padding_mask=mask)
        differentiate(backend, w, dropout_p=0.1)
        mssa(w[0].transpose(0, 1), cu_seqlens=offsets, max_seqlen=35, backend=backend)
        mssa(w, causal=True, cache=cache, backend=backend)

    calls()  # compiling may wait
    cache.reset()
    with no_waiting():
        calls()


def test_runs_on_the_tensors_device(backend):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: make gpu where there are")
    w = tokens(2, 3, 65, 64)
    check_equal([t.to(w.device) for t in differentiate(backend, w.to("cuda:1"))], differentiate(backend, w))
