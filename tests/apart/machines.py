"""What calls need around them: NaN in fresh memory, and machines that stand in for a GPU."""

import os
import warnings
from contextlib import ExitStack, contextmanager

import pytest

from crate_kernels._core import backends
from tests.apart.call import HOPPER
from tests.tools import fresh


def quiet():
    """Make warnings errors, as in the suite, but for those that are of no concern."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", ".*batching rule", UserWarning)  # of vmap over PyTorch's own attention
    warnings.filterwarnings("ignore", ".*encountered", RuntimeWarning)  # NumPy warns of NaN in Triton's interpreter
    warnings.filterwarnings("ignore", ".torch.jit.script", DeprecationWarning)  # torch.func.jvp calls it


@contextmanager
def taking_hopper(pairs):
    """Emulate a Hopper GPU on which mssa takes what kernels of sm_90a serve; long backwards by pairs, or by rows."""
    from crate_kernels._triton import table
    from crate_kernels.ops.mssa.cuda import heads, long_pairs, long_rows
    from tests.tools.emulator import gpu

    every = (heads.FORWARD, heads.BACKWARD, long_rows.FORWARD, long_pairs.BACKWARD if pairs else long_rows.BACKWARD)
    with ExitStack() as stack:
        gpu.change_device(capability=90, shared_limit=227 * 1024)
        stack.callback(gpu.change_device)
        for one in every:
            stack.enter_context(table.forced(one, one.candidates[0]))
        yield


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
        if backend in ("emulated", *HOPPER):
            from tests.tools import natives
            from tests.tools.emulator import emulated

            reason = emulated.unavailable_reason()
            if reason:
                raise SystemExit(f"the CUDA emulator {reason}")
            emulated.load()
            natives.register(backend)
            stack.callback(backends.unregister, backend)
        if backend in HOPPER:
            stack.enter_context(taking_hopper(backend == "pairs"))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        fresh.fill(patch)
        yield
