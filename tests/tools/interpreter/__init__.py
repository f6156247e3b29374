"""What Triton's interpreter computes otherwise than a GPU, by itself."""

from contextlib import ExitStack, contextmanager

import pytest


@contextmanager
def patched(owner, **wrappers):
    """Put ``wrapper(method)`` in the place of methods of a class for as long as the context is open."""
    with pytest.MonkeyPatch.context() as patch:
        for name, wrapper in wrappers.items():
            patch.setattr(owner, name, wrapper(getattr(owner, name)))
        yield


@contextmanager
def arithmetic_of_gpus():
    """Let it compute bfloat16, masks, multiply-adds and sums as GPUs do, and products alike everywhere."""
    from tests.tools.interpreter import bfloat16, contraction, masks, products, sums

    patches = (bfloat16.computed, masks.spread, products.computed, contraction.explicit, sums.by_halves)
    with ExitStack() as stack:
        for each in patches:
            stack.enter_context(each())
        yield
