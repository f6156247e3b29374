"""``torch.library.opcheck`` of every op: schemas, fakes and the dispatch of gradients."""

from dataclasses import replace

import pytest
import torch

import crate_kernels
from crate_kernels import testing
from crate_kernels._core import backends
from crate_kernels.ops.ista import op as ista_op
from crate_kernels.ops.mssa import logsumexp, rectangular
from crate_kernels.ops.mssa import op as mssa_op
from crate_kernels.ops.mssa.call import MSSACall
from crate_kernels.ops.tssa import op as tssa_op
from tests.ops.common import home, kernels, leaves

pytestmark = pytest.mark.usefixtures("plain_backend")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def saved(op, name, backend="composite"):
    case = next(c for c in testing.CASES if c.op == op and c.name == name)
    if op in ("mssa", "tssa"):  # a few tokens: no number is looked at
        batch, nheads, seqlen, head_dim = case.shape
        short = tuple(min(n, 9) for n in case.lengths)
        case = replace(case, shape=(batch, nheads, min(seqlen, 9), head_dim), lengths=short)
    return leaves(case, device=home(backend))


def _mssa_forward_args(name, backend, seed=None, dropout_p=0.0):
    inputs = saved("mssa", name, backend)
    others = inputs.others
    masks = (others.get("key_padding_mask"), others.get("cu_seqlens"), others.get("max_seqlen", 0))
    options = ("causal" in name, 0.25, dropout_p, None, backend)
    seed = None if seed is None else seed.to(home(backend))
    return inputs.differentiable["w"], *masks, seed, *options


def _mssa_backward_args(name, backend, **kwargs):
    w, *options = _mssa_forward_args(name, backend, **kwargs)
    out, lse = mssa_op.mssa_fwd(w.detach(), *options)
    return torch.randn_like(out), torch.randn_like(lse), w, out, lse, *options


def _lse_args(causal, backward=False):
    w, mask = torch.randn(2, 5, 3, 8).transpose(1, 2), torch.arange(5) < torch.tensor([[5], [2]])
    call = MSSACall(key_padding_mask=mask, causal=causal, scale=0.3)
    lse = logsumexp._lse_fwd(w, *call)
    w.requires_grad_()
    return (torch.randn_like(lse), w, lse, *call) if backward else (w, *call)


def _mssa_decode_args(ragged, backend):
    device = home(backend)
    cache = crate_kernels.SubspaceCache(2, 3, 16, 8, device=device)
    mask = torch.arange(4, device=device) < torch.tensor([[2], [4]], device=device) if ragged else None
    w = torch.randn(2, 3, 4, 8, device=device)
    return w, cache.data, cache.lengths, mask, 0, True, 0.3, True, backend


def _tssa_args(name, backend, seed=None, dropout_p=0.0, sums_every=0):
    inputs = saved("tssa", name, backend)
    tensors, others = inputs.differentiable, inputs.others
    masks = (others.get("key_padding_mask"), others.get("cu_seqlens"), others.get("max_seqlen", 0))
    options = (*masks, None if seed is None else seed.to(home(backend)), dropout_p, sums_every, backend)
    w, temp = tensors["w"], tensors["temp"].detach().reshape(-1).requires_grad_()
    if "denom_bias" not in tensors:
        return w, temp, *options
    return w, temp, tensors["denom_bias"].detach().squeeze(-1)[:, :-3].requires_grad_(), *options


def _tssa_backward_args(name, backend, **kwargs):
    args = _tssa_args(name, backend, **kwargs)
    causal = "causal" in name
    split = 3 if causal else 2
    forward = tssa_op.tssa_causal_fwd if causal else tssa_op.tssa_fwd
    with torch.no_grad():
        out, membership, *rest = forward(*args)
    return torch.randn_like(out), torch.randn_like(membership), *args[:split], membership, *rest, *args[split:]


def _tssa_decode_args(ragged, backend):
    device = home(backend)
    cache = crate_kernels.TokenStatsCache(2, 3, 8, device=device)
    mask = torch.arange(4, device=device) < torch.tensor([[2], [4]], device=device) if ragged else None
    w, temp, bias = (torch.rand(*shape, device=device) for shape in ((2, 3, 4, 8), (3,), (3, 16)))
    return w, temp, bias, *cache._tensors(), mask, backend


def _ista_args(name, backend):
    tensors = saved("ista", name, backend).differentiable
    return tensors["x"], tensors["weight"], 0.1, 0.1, name != "two-sided", torch.float32, backend


def _ista_backward_args(name, backend, needs):
    *args, backend = _ista_args(name, backend)
    with torch.no_grad():
        y = ista_op.ista_fwd(*args, backend)
    x, weight, *options = args
    return torch.randn_like(y), x, weight, y, *needs, *options, backend


def _overcomplete_args(keep, backend):
    tensors = saved("ista_overcomplete", "two-steps", backend).differentiable
    return tensors["x"], tensors["weight"], tensors["decoder"], keep, 0.1, 0.1, 2, backend


def _overcomplete_backward_args(backend):
    x, weight, decoder, keep, *options = _overcomplete_args(True, backend)
    with torch.no_grad():
        out, codes, residuals = ista_op.ista_overcomplete_fwd(x, weight, decoder, keep, *options)
    return torch.randn_like(out), x, weight, decoder, codes, residuals, *options


RECTANGULAR = [k for k in kernels("mssa") if backends.unavailable_reason(rectangular.PART, k, home(k)) is None]
SEED = {"seed": torch.tensor(5), "dropout_p": 0.3}


def _rectangular_args(backend, backward=False):
    device = home(backend)
    (w, dout), numbers = torch.randn(2, 2, 3, 5, 8, device=device), torch.randn(3, 2, 3, 5, device=device)
    kept, seed = torch.rand(2, 5, device=device) > 0.3, torch.tensor(5, device=device)
    call = rectangular.RectangularCall(kept[:, :3], kept[:, 2:], 4, 2, True, 0.3, seed, 0.2, 1, 5)
    sides = [[t[:, :, part] for t in (w, dout, *numbers)] for part in (slice(3), slice(2, 5))]
    tensors = [*sides[0], *sides[1]] if backward else [side[0] for side in sides]
    return *tensors, *call, backend


def rectangular_checks(backend):
    fwd, bwd = rectangular.op.mssa_rectangular_fwd, rectangular.op.mssa_rectangular_bwd
    both = torch.randn(2, 2, 3, 5, 8, device=home(backend))
    return {
        f"mssa_rectangular_fwd-{backend}": (fwd, lambda: _rectangular_args(backend)),
        f"mssa_rectangular_delta-{backend}": (rectangular.op.mssa_rectangular_delta, lambda: (*both, backend)),
        f"mssa_rectangular_bwd-{backend}": (bwd, lambda: _rectangular_args(backend, backward=True)),
    }


def mssa_checks(backend):
    decoder = "composite" if backend == "plain" else backend  # composite decodes behind the op
    return {
        f"mssa_fwd-{backend}": (mssa_op.mssa_fwd, lambda: _mssa_forward_args("n65", backend)),
        f"mssa_fwd-pad-{backend}": (mssa_op.mssa_fwd, lambda: _mssa_forward_args("pad-row", backend)),
        f"mssa_fwd-packed-{backend}": (mssa_op.mssa_fwd, lambda: _mssa_forward_args("causal-packed", backend)),
        f"mssa_fwd-dropout-{backend}": (mssa_op.mssa_fwd, lambda: _mssa_forward_args("dropout", backend, **SEED)),
        f"mssa_bwd-{backend}": (mssa_op.mssa_bwd, lambda: _mssa_backward_args("causal-n65", backend)),
        f"mssa_bwd-packed-{backend}": (mssa_op.mssa_bwd, lambda: _mssa_backward_args("packed", backend, **SEED)),
        f"mssa_decode-{backend}": (mssa_op.mssa_decode, lambda: _mssa_decode_args(False, decoder)),
        f"mssa_decode-ragged-{backend}": (mssa_op.mssa_decode, lambda: _mssa_decode_args(True, decoder)),
    }


def tssa_checks(backend):
    full, causal, fwd = tssa_op.tssa_fwd, tssa_op.tssa_causal_fwd, _tssa_args
    full_bwd, causal_bwd, bwd = tssa_op.tssa_bwd, tssa_op.tssa_causal_bwd, _tssa_backward_args
    return {
        f"tssa_fwd-{backend}": (full, lambda: fwd("n65", backend)),
        f"tssa_fwd-packed-{backend}": (full, lambda: fwd("packed", backend, **SEED)),
        f"tssa_bwd-{backend}": (full_bwd, lambda: bwd("pad-row", backend)),
        f"tssa_bwd-packed-{backend}": (full_bwd, lambda: bwd("packed", backend)),
        f"tssa_causal_fwd-{backend}": (causal, lambda: fwd("causal-n65", backend)),
        f"tssa_causal_fwd-sums-{backend}": (causal, lambda: fwd("causal-n65", backend, sums_every=4)),
        f"tssa_causal_fwd-sums-packed-{backend}": (causal, lambda: fwd("causal-packed", backend, sums_every=2)),
        f"tssa_causal_bwd-{backend}": (causal_bwd, lambda: bwd("causal-pad-row", backend, **SEED)),
        f"tssa_causal_bwd-sums-{backend}": (causal_bwd, lambda: bwd("causal-n65", backend, sums_every=4)),
        f"tssa_causal_bwd-packed-{backend}": (causal_bwd, lambda: bwd("causal-packed", backend)),
        f"tssa_decode-{backend}": (tssa_op.tssa_decode, lambda: _tssa_decode_args(False, backend)),
        f"tssa_decode-ragged-{backend}": (tssa_op.tssa_decode, lambda: _tssa_decode_args(True, backend)),
    }


def ista_checks(backend):
    fwd, bwd, both = ista_op.ista_fwd, ista_op.ista_bwd, (True, True)
    over, over_bwd = ista_op.ista_overcomplete_fwd, ista_op.ista_overcomplete_bwd
    return {
        f"ista_fwd-{backend}": (fwd, lambda: _ista_args("many-tokens", backend)),
        f"ista_fwd-few-{backend}": (fwd, lambda: _ista_args("few-tokens", backend)),
        f"ista_bwd-{backend}": (bwd, lambda: _ista_backward_args("many-tokens", backend, both)),
        f"ista_bwd-dx-{backend}": (bwd, lambda: _ista_backward_args("two-sided", backend, (True, False))),
        f"ista_bwd-few-{backend}": (bwd, lambda: _ista_backward_args("few-tokens", backend, both)),
        f"ista_overcomplete_fwd-{backend}": (over, lambda: _overcomplete_args(False, backend)),
        f"ista_overcomplete_fwd-keep-{backend}": (over, lambda: _overcomplete_args(True, backend)),
        f"ista_overcomplete_bwd-{backend}": (over_bwd, lambda: _overcomplete_backward_args(backend)),
    }


OPCHECKS = {
    "mssa_lse_fwd": (logsumexp._lse_fwd, lambda: _lse_args(causal=False)),
    "mssa_lse_bwd": (logsumexp._lse_bwd, lambda: _lse_args(causal=True, backward=True)),
    **{
        name: check
        for checks, found in (
            (mssa_checks, ["plain", *kernels("mssa")]),
            (rectangular_checks, ["composite", *RECTANGULAR]),
            (tssa_checks, ["composite", *kernels("tssa")]),
            (ista_checks, ["composite", *kernels("ista")]),
        )
        for backend in found
        for name, check in checks(backend).items()
    },
}


def marks(name):
    """Leave to make test-all other options of an op, where the interpreter takes long or cpp is checked with them."""
    slow = name.endswith("-triton") and home("triton") == "cpu"
    beside = name.endswith(("-plain", "-composite")) and "cpp" in kernels("mssa")
    more = any(f"-{option}-" in name for option in ("pad", "packed", "dropout", "ragged", "keep", "dx", "sums"))
    return pytest.mark.exhaustive if more and (slow or beside) else ()


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in OPCHECKS])
def test_opcheck(name):
    op, make = OPCHECKS[name]
    args = make()
    utils = ["test_schema", "test_faketensor"]
    if not (name.endswith("-triton") and home("triton") == "cpu"):  # compilers see a name, which others have too
        utils.append("test_aot_dispatch_dynamic")
    if any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):  # caches never do
        utils.append("test_autograd_registration")
    overload = getattr(torch.ops.crate_kernels, op.__name__).default
    torch.library.opcheck(overload, args, test_utils=utils)
