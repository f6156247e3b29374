"""ista's kernels on a GPU: the widths of models, autocast, huge tensors, graphs, repeatability."""

import pytest
import torch

from crate_kernels import ista, ista_overcomplete, testing
from tests.gpu.common import DTYPES, HALF, captured, check_equal, no_waiting, on_a_busy_stream
from tests.gpu.fixtures import DEVICE, DRY, backend, exact_products  # noqa: F401
from tests.ops.common import over_tolerance

pytestmark = pytest.mark.exhaustive  # where there is no GPU; make gpu runs all of them

# In half precision no wider token is clear of every threshold, which the tolerance needs; wider ones follow below.
WIDTHS = {"tiny": (2, 197, 96), "few": (1, 50, 128), "odd": (3, 211, 72)}
MODELS = [(70, 64), (9, 64)] if DRY else [(25216, 768), (12608, 576), (197, 1024), (1, 768)]


def matrix(*shape, dtype=HALF, seed=0):
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nonnegative", [True, False], ids=["relu", "two-sided"])
@pytest.mark.parametrize("name", WIDTHS)
def test_is_within_tolerance(name, nonnegative, dtype, backend):
    options = {} if nonnegative else {"nonnegative": False, "lambd": 2.0}
    case = testing.Case("ista", f"gpu-{name}-{nonnegative}", WIDTHS[name], options)
    assert over_tolerance(case, dtype, backend, DEVICE) == []


@pytest.mark.parametrize("autocast", [False, True], ids=["half", "autocast"])
@pytest.mark.parametrize(("rows", "dim"), MODELS)
def test_in_the_widths_of_models_is_as_good_as_eager(rows, dim, autocast, backend):
    """By the mean square error, which single elements at their thresholds leave alone."""
    dtype = torch.float32 if autocast else HALF
    x, weight, dy = (matrix(*s, dtype=dtype, seed=i) for i, s in enumerate([(rows, dim), (dim, dim), (rows, dim)]))
    weight *= dim**-0.5

    def run(backend, *tensors):
        leaves = [t.detach().requires_grad_() for t in tensors]
        with torch.autocast(DEVICE, dtype=HALF, enabled=leaves[0].dtype == torch.float32):
            y = ista(*leaves, lambd=0.0, nonnegative=False, backend=backend)
        return y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))

    exact = run("reference", x.double(), weight.double())
    for ours, eager, true in zip(run(backend, x, weight), run("reference", x, weight), exact, strict=True):
        error, eager_error = ((t.double() - true).square().mean().sqrt() for t in (ours, eager))
        assert ours.isfinite().all()
        assert error <= 2 * (eager_error + torch.finfo(ours.dtype).eps * true.square().mean().sqrt())


FUNCTIONS = pytest.mark.parametrize("function", [ista, ista_overcomplete])
COUNTS = pytest.mark.parametrize("rows", [9, 300], ids=["few", "many"])


def weights(function, seed=1):
    return matrix(64, 64 if function is ista else 256, seed=seed) / 8


def differentiate(backend, function, x, weight):
    leaves = [t.detach().requires_grad_() for t in (x, weight)]
    y = function(*leaves, backend=backend)
    upstream = torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).to(y.dtype)
    return y.detach(), *torch.autograd.grad(y, leaves, upstream)


@FUNCTIONS
@COUNTS
def test_gives_the_same_bits_twice(rows, function, backend):
    x, weight = matrix(rows, 64), weights(function)
    check_equal(differentiate(backend, function, x, weight), differentiate(backend, function, x, weight))


@FUNCTIONS
def test_addresses_more_than_two_billion_elements(function, backend):
    """The last tokens lie past 2^31: of x, y and their gradients, or of the codes."""
    dim = 16 if DRY else (256 if function is ista else 64)
    hidden = dim if function is ista else 4 * dim
    rows = 100 if DRY else 2**31 // hidden + 300
    x, weight = torch.zeros(rows, dim, dtype=HALF, device=DEVICE), matrix(dim, hidden) / dim**0.5
    x[-2:] = matrix(2, dim, seed=1)
    y, dx, _ = differentiate(backend, function, x, weight)
    last, exact_weight = x[-2:].double().requires_grad_(), weight.double()
    exact = function(last, exact_weight, backend="reference")
    upstream = torch.linspace(-1, 1, y.numel(), device=DEVICE)[-2 * dim :].view(2, dim).to(y.dtype)
    (exact_dx,) = torch.autograd.grad(exact, last, upstream.double())
    assert (y[-2:].double() - exact).abs().max() < 8 * torch.finfo(HALF).eps * exact.abs().max()
    # An activation within rounding of its threshold may be on its other side.
    near = (dx[-2:].double() - exact_dx).abs() < 16 * torch.finfo(HALF).eps * exact_dx.abs().max()
    assert near.double().mean() > 0.9
    assert not y[:-2].any()


@FUNCTIONS
@COUNTS
def test_forward_and_backward_replay_as_a_graph(rows, function, backend):
    x, weight = matrix(rows, 64), weights(function)
    replay = captured(lambda: differentiate(backend, function, x, weight))
    for seed in (2, 3):
        x.copy_(matrix(rows, 64, seed=seed))
        check_equal([t.clone() for t in replay()], differentiate(backend, function, x, weight))


@FUNCTIONS
@COUNTS
def test_runs_on_the_current_stream(rows, function, backend):
    x, weight = matrix(rows, 64), weights(function)
    check_equal(
        on_a_busy_stream(lambda late: differentiate(backend, function, late, weight), x),
        differentiate(backend, function, x, weight),
    )


def test_never_waits_for_the_device(backend):
    def calls():
        for function in (ista, ista_overcomplete):
            for rows in (9, 300):
                differentiate(backend, function, matrix(rows, 64), weights(function))
                with torch.autocast(DEVICE, dtype=HALF):
                    differentiate(backend, function, matrix(rows, 64, dtype=torch.float32), weights(function).float())

    calls()  # compiling may wait
    with no_waiting():
        calls()


@FUNCTIONS
def test_runs_on_the_tensors_device(function, backend):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: make gpu where there are")
    x, weight = matrix(300, 64), weights(function)
    there = differentiate(backend, function, x.to("cuda:1"), weight.to("cuda:1"))
    check_equal([t.to(x.device) for t in there], differentiate(backend, function, x, weight))
