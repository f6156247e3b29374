"""What mssa's kernels of sm_90a compile to: ``python -m tests.ops.mssa.aot_hopper`` records it, without a GPU.

``aot_hopper.json`` has, for one version of NVRTC and by kernel, instructions and dynamic shared memory of a block,
which may not grow, powers that run beside products, and blocks of a multiprocessor, of which there may not be fewer.
The launches are those of the planners.
"""

import json
import re
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from crate_kernels._cuda import launch
from crate_kernels.ops.mssa.call import MSSACall
from crate_kernels.ops.mssa.cuda import heads, hopper, long_pairs, long_rows, problem, tensor_cores
from tests.cuda import compilers, resources
from tests.tools.aot import harness

RECORDED = Path(__file__).with_suffix(".json")
PRODUCT, POWER, WAIT = "HGMMA", "MUFU.EX2", "WARPGROUP.DEPBAR"
BF16, FP16 = torch.bfloat16, torch.float16
# Kinds of kernels, dtype, channels, tokens.
SIZES = [
    *((heads, BF16, dim, 197) for dim in (32, 48, 64, 128)),
    *((heads, FP16, dim, 197) for dim in (32, 64)),
    *((kernels, dtype, dim, 300) for kernels in (long_rows, long_pairs) for dtype in (BF16, FP16) for dim in (64, 128)),
]


@contextmanager
def recording():
    """Answer for an H200, and list the launches instead of making them."""
    found = []
    gpu = SimpleNamespace(capability=90, multiprocessors=132, shared_limit=hopper.SHARED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "gpu", lambda device: gpu)
        patch.setattr(launch, "run", lambda kernel, shape, *rest: found.append((kernel, shape)))
        yield found


def launches():
    """Return the shape of a launch of every kernel, of those that take what is left too."""
    with recording() as found:
        for kernels, dtype, dim, seqlen in SIZES:
            for causal in (False, True):
                for masked in (False, True):
                    call_both_ways(kernels, dtype, dim, seqlen, causal, masked)
    return dict(found)


def call_both_ways(kernels, dtype, dim, seqlen, causal, masked):
    """Have the planners launch a call's kernels, on tensors whose numbers nothing reads."""
    w, lse = torch.zeros(1, 1, seqlen, dim, dtype=dtype).expand(64, 12, -1, -1), torch.zeros(64, 12, seqlen)
    mask = torch.ones(64, seqlen, dtype=torch.bool) if masked else None
    call = MSSACall(key_padding_mask=mask, causal=causal, scale=dim**-0.5)
    if kernels is not long_pairs:
        assert kernels.serves_forward(w, w, call)
        left = kernels.forward(w, call, w, lse)
        tensor_cores.forward(problem.of_forward(w, call, w, lse), w, call, left)
    assert kernels.serves_backward(w, w, w, call)
    left = kernels.backward(w, None, w, w, lse, call, w)
    fields = problem.of_backward(w, None, w, w, lse, call, w, torch.zeros(2, *lse.shape))
    tensor_cores.backward(fields, w, call, left)


def instructions_of(kernel, compiler):
    """Return a kernel's instructions, and what the assembler says of it."""
    cubin, (said,) = resources.compiled(compiler, kernel, 90)
    (function,) = harness.disassembled(cubin)
    return function.instructions, said


def powers_beside_products(instructions):
    """Return how many powers come between the last product of a group and the wait for that group."""
    found = unfinished = 0
    for one in instructions:
        if one.opcode.startswith(PRODUCT):
            unfinished += one.operands[-1] == "gsb0"
        elif one.opcode.startswith(WAIT):
            unfinished = min(unfinished, int(one.operands[-1], 16))
        elif one.opcode.startswith(POWER):
            found += unfinished > 0
    return found


def measured(kernel, shape, compiler):
    """Return what is recorded of a kernel."""
    instructions, said = instructions_of(kernel, compiler)
    assert said.spills == 0
    blocks = resources.blocks_per_multiprocessor(said.registers, shape.threads, shape.shared_bytes + said.shared)
    return [len(instructions), shape.shared_bytes, powers_beside_products(instructions), blocks]


def main():
    compiler = compilers.needed()
    found = {kernel.name: measured(kernel, shape, compiler) for kernel, shape in sorted(launches().items(), key=str)}
    text = json.dumps({"nvrtc": "{}.{}".format(*compiler.version), "kernels": found}, indent=1)
    RECORDED.write_text(re.sub(r"\[\s+(\d+),\s+(\d+),\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2, \3, \4]", text) + "\n")


if __name__ == "__main__":
    main()
