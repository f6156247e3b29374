"""What calls need around them: NaN in fresh memory, and machines that stand in for a GPU."""

import os
import warnings
from contextlib import ExitStack, contextmanager

import pytest

from tests.tools import fresh


def quiet():
    """Make warnings errors, as in the suite, but for those that are of no concern."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", ".*batching rule", UserWarning)  # of vmap over PyTorch's own attention
    warnings.filterwarnings("ignore", ".*encountered", RuntimeWarning)  # NumPy warns of NaN in Triton's interpreter
    warnings.filterwarnings("ignore", ".torch.jit.script", DeprecationWarning)  # torch.func.jvp calls it


@contextmanager
def ready(backend):
    """Let calls on ``backend`` run here for as long as the context is open.

    Triton's interpreter needs TRITON_INTERPRET=1 from the start of the process: without it, its calls are refused.
    """
    with ExitStack() as stack:
        if backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1":
            from tests.tools.interpreter import arithmetic_of_gpus, launches

            for patched in (arithmetic_of_gpus, launches.quick):
                stack.enter_context(patched())
        if backend == "emulated":
            from tests.tools.emulator import emulated

            reason = emulated.unavailable_reason()
            if reason:
                raise SystemExit(f"the CUDA emulator {reason}")
            emulated.load()
            emulated.register()
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        fresh.fill(patch)
        yield
