"""Every access of CUDA kernels to memory is ordered by barriers, each of which is needed: emulated."""

import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from crate_kernels import testing
from crate_kernels.ops.ista import cuda as ista
from tests.ops import test_cache as caches
from tests.ops.common import over_tolerance, randn
from tests.ops.mssa import test_cuda_decode as decode
from tests.ops.mssa.heads import Heads, LongPairs, LongRows
from tests.ops.mssa.hopper import HOPPER, run_and_check, run_and_check_forward
from tests.ops.tssa.common import DEVICES
from tests.ops.tssa.persistent import MAX_SHARED, Persistent
from tests.ops.tssa.walking import Walking
from tests.tools.emulator.fixtures import ROOT
from tests.tools.emulator.plain import registered
from tests.tools.emulator.plain.mssa import native

# The last has one place for tokens, which the next head is loaded to.
HEADS = "197-tokens", "packed", "causal-padded"
FORWARD_HEADS, BACKWARD_HEADS = (*HEADS, "128-channels-long"), (*HEADS, "112-channels")
LONG = "packed", "causal", "128-channels-many-tiles"
_OPTIONS = {
    "causal-padded": {"causal": True, "padding": "scattered"},
    "dropout": {"dropout_p": 0.3},
    "threshold": {"phi": "threshold", "threshold": 0.1, "causal": True},
}
TOKENS = {
    "plain": ((2, 3, 85, 32), {}),
    "padded": ((2, 5, 85, 24), {"padding": "scattered"}),
    "packed": ((0, 3, 0, 32), {"lengths": (64, 0, 101, 1), "dropout_p": 0.3}),
}
TENSOR_CORES = {
    "pairs": ((2, 2, 197, 64), {}),
    "rows": ((1, 2, 300, 64), {}),
    "128-channels": ((1, 1, 150, 128), {"causal": True}),
    "packed": ((0, 2, 0, 48), {"lengths": (70, 0, 3, 129)}),
    **{name: ((3, 2, 97, 40), options) for name, options in _OPTIONS.items()},
}
PLAIN = {
    "wide": ((1, 2, 70, 200), {}),
    "256-channels": ((1, 2, 70, 256), {"dropout_p": 0.2}),
    "causal": ((1, 1, 129, 24), {"causal": True}),
    "packed": ((0, 2, 0, 80), {"lengths": (70, 0, 3, 129), "causal": True}),
    **{name: ((3, 2, 97, 40), options) for name, options in _OPTIONS.items()},
}
HALVES = torch.bfloat16, torch.float16
# Barriers whose absence the emulator does not see: file, which, why.
NOT_SEEN = {
    ("mssa/cuda/head_forward.cuh", 0): "lanes shuffle behind their reads, too, which orders them on GPUs of today",
    ("mssa/cuda/mma_rows.cuh", 0): "the same",
    ("tssa/cuda/full_steps.cuh", 0): "the same",
    ("mssa/cuda/long_forward.cuh", 2): "orders products of two warp groups in time: it is for speed",
}
BARRIER = re.compile(r"__syncthreads\(\);|__syncwarp\(\);|cluster_sync\(\);|barrier_sync\([^;]*\);")


def symmetrized(gpu):
    gpu.device(traced=True)
    a = randn(70, 70, dtype=torch.float32)
    both = torch.empty_like(a)
    ista.symmetrize(a, both)
    assert torch.equal(both, a + a.t())


def within(op, shape, options, backend, dtypes):
    """Hold a call to its tolerance; ``options``: the operator's, and what else a case has."""
    fields = {key: value for key, value in options.items() if key in testing.Case.__dataclass_fields__}
    options = {key: value for key, value in options.items() if key not in fields}
    for dtype in dtypes:
        case = testing.Case(op, f"races-{shape}-{options}-{fields}", shape, options, **fields)
        assert over_tolerance(case, dtype, backend, "cpu") == []


def by_tssa(way, causal, shape, options, gpu):
    gpu.device(traced=True, **DEVICES[way])
    options = {"return_membership": True, "causal": causal, **options}
    within("tssa", shape, options, gpu.backend, (torch.float32, torch.bfloat16))


def cached(gpu):
    gpu.device(traced=True)
    caches.test_decoding_equals_the_full_forward("tssa", gpu.backend, "cpu", (5, 7))


def by_hopper(kind, name, gpu):
    case = kind(name)
    count = case.config["CLUSTER"] * case.config.get("TOGETHER", 1)
    gpu.device(capability=90, shared_limit=MAX_SHARED, multiprocessors=count, traced=True)
    case.check(gpu.backend, torch.bfloat16)


def by_head(kind, check, name, gpu):
    gpu.device(**HOPPER, traced=True)
    for dtype in HALVES:
        check(kind(name, dtype))


def by_mssa(backend, dtypes, shape, options, gpu):
    gpu.device(traced=True)
    within("mssa", shape, {"return_lse": True, **options}, getattr(gpu, backend), dtypes)


def decoded(count, new, gpu):
    gpu.device(traced=True)
    gpu.monkeypatch.setattr(native, "choose_splits", lambda *sizes: count)
    cache, w = decode.filled((130, 67), 220, 64, torch.bfloat16)
    tokens = torch.stack([w[b, :, n : n + new] for b, n in enumerate((130, 67))])
    assert decode.over_tolerance(gpu.plain, cache, tokens) == []


QUICK = {"ista/cuda/": ("symmetrize",), "tssa/cuda/persistent": ("odd-heads-padded",)}
# What each family of headers is called by.
CALLS = {
    "ista/cuda/": {"symmetrize": symmetrized},
    "tssa/cuda/full|tssa/cuda/access": {
        f"{way}-{name}": partial(by_tssa, way, False, *call) for way in DEVICES for name, call in TOKENS.items()
    },
    "tssa/cuda/causal|tssa/cuda/scan": {
        **{name: partial(by_tssa, "block", True, *call) for name, call in TOKENS.items()},
        "cached": cached,
    },
    "tssa/cuda/persistent": {
        name: partial(by_hopper, Persistent, name)
        for name in ("196-tokens", "packed-dropout", "padded-scattered", "odd-heads-padded", "two-clusters")
    },
    "tssa/cuda/walking": {
        name: partial(by_hopper, Walking, name) for name in ("three-steps", "packed-dropout", "padded-scattered")
    },
    "mssa/cuda/head": {
        **{f"forward-{name}": partial(by_head, Heads, run_and_check_forward, name) for name in FORWARD_HEADS},
        **{f"backward-{name}": partial(by_head, Heads, run_and_check, name) for name in BACKWARD_HEADS},
    },
    "mssa/cuda/long": {
        **{f"forward-{name}": partial(by_head, LongRows, run_and_check_forward, name) for name in LONG},
        **{f"backward-{name}": partial(by_head, LongRows, run_and_check, name) for name in LONG},
        **{f"pairs-{name}": partial(by_head, LongPairs, run_and_check, name) for name in LONG},
    },
    "mssa/cuda/mma": {
        name: partial(by_mssa, "backend", HALVES, shape, options) for name, (shape, options) in TENSOR_CORES.items()
    },
    "mssa/cuda/plain": {
        name: partial(by_mssa, "plain", (torch.float32, torch.bfloat16), shape, options)
        for name, (shape, options) in PLAIN.items()
    },
    "mssa/cuda/decode": {f"new{new}": partial(decoded, 3, new) for new in (1, 17)},
}


@pytest.fixture
def gpu(library, backend, device, monkeypatch):
    """Return what calls use: a function that changes the emulated GPU, and backends."""
    with registered() as plain:
        yield SimpleNamespace(device=device, backend=backend, plain=plain, monkeypatch=monkeypatch)


def called():
    for family, calls in CALLS.items():
        for name, run in calls.items():
            quick = name in QUICK.get(family, ())
            yield pytest.param(run, id=f"{family.split('|')[0]}-{name}", marks=() if quick else pytest.mark.exhaustive)


@pytest.mark.parametrize("run", list(called()))
def test_every_access_is_ordered(run, gpu):
    """The emulator stops at one that no barrier orders after what another thread has written, or read."""
    run(gpu)


def test_blocks_that_nothing_orders_do_not_share_what_one_writes(gpu):
    """In place, a block reads the tile of another, before or after that is written."""
    gpu.device(traced=True)
    a = randn(70, 70, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="global memory is touched by blocks that nothing orders, and one writes"):
        ista.symmetrize(a, a)


def barriers():
    for path in sorted(ROOT.glob("csrc/*/cuda/*.cuh")):
        name = path.relative_to(ROOT / "csrc").as_posix()
        if not name.startswith("common/"):
            count = len(BARRIER.findall(path.read_text()))
            yield from ((name, number) for number in range(count) if (name, number) not in NOT_SEEN)


def every(calls, gpu):
    for run in calls.values():
        run(gpu)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "number"), list(barriers()))
def test_every_barrier_is_needed(name, number, gpu, copied):
    """Without it, a call of its kernels is stopped."""
    path = copied() / "csrc" / name
    text = path.read_text()
    at = list(BARRIER.finditer(text))[number]
    path.write_text(text[: at.start()] + "{}" + text[at.end() :])
    calls = next(calls for family, calls in CALLS.items() if re.match(family, name))
    # Those first that are named as the header is.
    calls = dict(sorted(calls.items(), key=lambda call: call[0].split("-")[0] not in name))
    with pytest.raises(RuntimeError, match="emulator: "):
        every(calls, gpu)
