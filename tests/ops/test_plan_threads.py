"""Plans in threads: of users, who call at once, and of autograd, which runs backward passes."""

import threading
from functools import partial

import pytest
import torch
import torch.utils.checkpoint

import crate_kernels as ck
from tests.ops.repeated import NEEDS_PLANS, both, call_of, hits, inputs, known, repeated_calls  # noqa: F401
from tests.tools.plans.replay import same_bits

pytestmark = NEEDS_PLANS
OPS = ("mssa", "tssa", "tssa-causal", "ista")
_DEPTH = 61  # of backward passes within one another, from which on autograd takes other threads


def at_once(*functions):
    """Run each in a thread, and raise what one raises."""
    errors = []

    def guarded(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


class Within(torch.autograd.Function):
    """The identity, whose backward calls a function."""

    @staticmethod
    def forward(ctx, x, run):
        ctx.run = run
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.enable_grad():
            ctx.run()
        return grad, None


def by_autograd(run, depth=_DEPTH):
    """Call ``run`` in a thread of autograd's."""
    inner = partial(by_autograd, run, depth - 1) if depth else run
    Within.apply(torch.ones((), requires_grad=True), inner).backward()  # pyright: ignore


def test_threads_do_not_take_each_others_plans():
    call, _ = call_of("mssa-causal")
    reference = partial(ck.mssa, causal=True, backend="reference")
    shapes = [{"seqlen": 1 + n % 10, "batch": 1 + n // 10} for n in range(50)]

    def work(seed):
        for turn in range(4):
            for n, sizes in enumerate(shapes):
                leaf = inputs("mssa", seed=seed + n + turn, **sizes)[0].requires_grad_()
                out, expected = call(leaf), reference(leaf)
                grads = [torch.autograd.grad(t.square().sum(), leaf)[0] for t in (out, expected)]
                torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
                torch.testing.assert_close(*grads, rtol=0, atol=1e-4)

    found, _ = hits(lambda: at_once(*[partial(work, 1000 * n) for n in range(4)]))
    assert found > 500


@pytest.mark.parametrize("name", OPS)
def test_a_backward_in_threads_of_autograd_repeats_in_several_at_once(name):
    call, make = known(name)
    expected = both(call, make(seed=4))
    users, seen, same = set(), [], []

    def passes():
        seen.append(threading.get_ident())
        same.append([same_bits(a, b) for a, b in zip(both(call, make(seed=4)), expected, strict=True)])

    def user():
        users.add(threading.get_ident())
        for _ in range(5):
            by_autograd(passes)

    found, _ = hits(lambda: at_once(*[user] * 4))
    assert found == 2 * 4 * 5
    assert users.isdisjoint(seen)
    assert same == [[True] * len(expected)] * 4 * 5


@pytest.mark.parametrize("name", OPS)
def test_a_plan_that_autograds_thread_records_serves_all(name):
    call, make = call_of(name)
    for seed in range(2):
        by_autograd(lambda s=seed: both(call, make(seed=s)))
    found, results = hits(lambda: both(call, make(seed=2)))
    assert found == 2
    expected = both(partial(call, backend="reference"), make(seed=2))
    torch.testing.assert_close(results, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", OPS)
def test_a_checkpoint_that_enters_the_backward_again_repeats(name):
    call, make = known(name)

    def gradient(run):
        first, *others = make(seed=5)
        first.requires_grad_()
        run(first, *others).square().sum().backward()
        grads.append(first.grad)

    grads = []
    for _ in range(2):  # their first input alone has a gradient
        gradient(call)
    checkpointed = partial(torch.utils.checkpoint.checkpoint, call, use_reentrant=True)
    found, _ = hits(lambda: at_once(*[partial(gradient, checkpointed)] * 4))
    assert found == 4 * 3, "forward, forward again, backward"
    assert [same_bits(grad, grads[0]) for grad in grads] == [True] * 6
