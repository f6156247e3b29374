"""Bounds of the CUDA C++ kernels from NVRTC's machine code.

A launch gives a kernel its shared memory, of which the machine code says nothing: here blocks per multiprocessor are
those that registers and warps allow.
"""

import re
import subprocess
import tempfile
from pathlib import Path

import torch

from crate_kernels._cuda.sources import Kernel
from crate_kernels.ops.mssa.cuda import steps, tensor_cores
from tests.cuda import compilers, report
from tests.cuda import resources as used
from tests.tools.aot import harness
from tests.tools.sass import kernel, listing

# family: how the names of its kernels begin
FAMILIES = {
    "cuda-mssa_forward-d64": "mssa::mma_forward_kernel<bf16, 64,",
    "cuda-mssa_forward-d64-n197": "mssa::mma_pairs_kernel<bf16, 64>",
    "cuda-mssa_forward-d128": "mssa::mma_forward_kernel<bf16, 128,",
    "cuda-mssa_backward-d64": "mssa::mma_backward_kernel<bf16, 64,",
    "cuda-mssa_backward-d128": "mssa::mma_backward_kernel<bf16, 128,",
    "cuda-mssa_decode": "decoding::mssa_decode_kernel<bf16, 1,",
    "cuda-tssa_forward": "tssa_full_fwd_chunk_kernel<TssaHalves,",
    "cuda-tssa_backward": "tssa_full_bwd_chunk_kernel<TssaHalves,",
    "cuda-tssa_causal_forward": "tssa_causal_fwd",
    "cuda-tssa_causal_backward": "tssa_causal_bwd_kernel<TssaFours,",
    "cuda-ista": "ista_update_kernel",
}
# Those of them that are compiled, and all of tssa's.
COMPILED = {
    "cuda-ista": Kernel("ista/cuda/update.cuh", "ista_update_kernel"),
    "cuda-mssa_forward-d64": tensor_cores.forward_kernel(torch.bfloat16, 64),
    "cuda-mssa_forward-d64-n197": tensor_cores.pairs_kernel(torch.bfloat16),
    "cuda-mssa_forward-d128": tensor_cores.forward_kernel(torch.bfloat16, 128),
    "cuda-mssa_backward-d64": tensor_cores.backward_kernel(torch.bfloat16, 64),
    "cuda-mssa_backward-d128": tensor_cores.backward_kernel(torch.bfloat16, 128),
    "cuda-mssa_decode": steps.decode_kernel(torch.bfloat16, 1, 1),
}
STREAMS = {name: not name.startswith(("cuda-mssa_forward", "cuda-mssa_backward")) for name in FAMILIES}
_SECTION = re.compile(r'\.section\s+\.nv\.info\.(\S+?),"')
_WORD = re.compile(r"\.word\s+0x([0-9a-f]+)")


def kernels(target):
    """Yield (family, name, bounds, the cubin that it is in) of the main kernels on ``target``.

    Without NVRTC there are none.
    """
    for cubin, said in _of_nvrtc(target):
        resources = {one.name: one for one in said}
        functions, threads = _disassembled(cubin)
        for function, name in zip(functions, report.short_names([f.name for f in functions]), strict=True):
            family = next((key for key, start in FAMILIES.items() if name.startswith(start)), None)
            if family is not None:
                one = resources[name]
                made = kernel.Build(target, one.registers, one.shared, -(-threads[function.name] // 32), one.stack)
                yield family, name, kernel.bounds(function, made), cubin


def _of_nvrtc(target):
    compiler = compilers.found()
    if compiler is not None:
        of_tssa = (one for one in used.kernels("tssa") if one.name.startswith(tuple(FAMILIES.values())))
        for one in (*COMPILED.values(), *of_tssa):
            yield used.compiled(compiler, one, int(target.removeprefix("sm_")))


def _disassembled(cubin):
    """Return the functions of a cubin, and the most threads of a block by function."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.cubin"
        path.write_bytes(cubin)
        command = [harness.nvidia_tool("nvdisasm"), path]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    threads, name, wanted = {}, None, False
    for line in text.splitlines():
        if section := _SECTION.search(line):
            name = section[1]
        elif "EIATTR_" in line:
            wanted = line.endswith("EIATTR_MAX_THREADS")
        elif wanted and (word := _WORD.search(line)):
            threads.setdefault(name, int(word[1], 16))
    return listing.functions(text), threads
