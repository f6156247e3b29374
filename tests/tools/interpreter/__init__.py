"""What Triton's interpreter computes otherwise than a GPU, by itself."""

from contextlib import ExitStack, contextmanager


@contextmanager
def arithmetic_of_gpus():
    """Let it compute bfloat16, masks, multiply-adds and sums as GPUs do, and products alike everywhere."""
    from tests.tools.interpreter import bfloat16, contraction, masks, products, sums

    patches = (bfloat16.computed, masks.spread, products.computed, contraction.explicit, sums.by_halves)
    with ExitStack() as stack:
        for patched in patches:
            stack.enter_context(patched())
        yield
