"""Shared memory: what a launch asks for is what the layout in the device code's own structs takes, to the byte."""

import shlex
import subprocess

import pytest
import torch
from torch.utils.cpp_extension import get_cxx_compiler

from crate_kernels._cuda.records import DTYPES
from crate_kernels._native import libraries
from crate_kernels.ops.mssa.cuda import heads, hopper, long_pairs, long_rows, plain
from crate_kernels.ops.tssa.cuda import forms, persistent, walking
from crate_kernels.ops.tssa.cuda.parameters import TssaProblem
from tests.tools import compiling
from tests.tools.emulator import emulated

SIDES = {False: "false", True: "true"}
DIMS, LONG_DIMS, ROWS = range(16, 129, 16), (64, 128), range(64, 257, 16)
WIDTHS = ((8, 48), (12, 64), (3, 16), (6, 32))  # heads, channels of each
HEADERS = (
    *("mssa/cuda/head_gradient.cuh", "mssa/cuda/head_output.cuh", "mssa/cuda/plain.cuh"),
    *(f"mssa/cuda/long_{name}.cuh" for name in ("forward", "backward", "pairs")),
    *(f"tssa/cuda/{name}.cuh" for name in ("persistent", "walking_forward", "walking_backward", "causal_backward")),
)


def whole_heads():
    for dim in DIMS:
        yield f"HeadForwardShape<bf16, {dim}, 64, false>::kMaxBeside", heads._max_blocks_per_sm(dim)
        for rows in ROWS:
            forward = f"HeadForwardShape<bf16, {dim}, {rows}, false>"
            bytes_ = heads.forward_shared_bytes(dim, rows)
            yield f"{forward}::kBytes", bytes_
            yield f"{forward}::kFitting", heads._MULTIPROCESSOR // (bytes_ + 1024)
            for masked, side in SIDES.items():
                found = heads.shared_bytes(dim, rows, masked)
                if found is not None:
                    yield f"HeadBackwardShape<bf16, {dim}, {rows}, {side}, false>::kBytes", found
    yield "HeadBackwardShape<bf16, 64, 64, false, false>::kMaxBytes", hopper.SHARED


def long_heads():
    for dim in LONG_DIMS:
        forward, panels = f"LongForwardShape<bf16, {dim}, false>", dim // 64
        yield f"{forward}::kBytes", long_rows.forward_shared_bytes(dim)
        yield f"{forward}::kRows", 64 * long_rows._GROUPS[dim]
        yield f"LongDeltaShape<bf16, {dim}>::kBytes", long_rows.delta_shared_bytes(dim)
        yield f"LongBackwardShape<bf16, {dim}, false>::kBytes", long_rows.backward_shared_bytes(dim)
        for both, side in SIDES.items():
            pairs = f"LongPairsShape<bf16, {dim}, {side}>"
            yield f"{pairs}::kBytes", long_pairs.shared_bytes(dim, both)
            yield f"{pairs}::kThreads", 128 * (long_pairs._GROUPS + 1)
            yield f"{pairs}::kPanels * {pairs}::kPanel", panels * long_pairs._TILE * long_pairs._ROW  # to round a tile


def fp32_products():
    own, tile, weights = "plain::kOwned * plain::kPitch", "plain::kTile * plain::kPitch", "plain::kWeightPitch"
    weights = f"plain::kOwned * {weights}"
    yield f"4 * ({own} + {tile} + {weights})", plain._FORWARD_SHARED
    yield f"4 * (2 * ({own}) + 2 * ({tile}) + {weights})", plain._BACKWARD_SHARED
    yield f"4 * (2 * ({own}))", plain._DELTA_SHARED
    yield f"4 * (2 * ({own}) + {tile})", plain._MEASURE_SHARED
    yield "plain::kThreads", plain._THREADS
    yield "plain::kChunk", plain._CHUNK


def sequences_on_chip():
    for nheads, head_dim in WIDTHS:
        for config in persistent.FORWARD.candidates:
            if not config["CLUSTER"]:
                continue
            of_cluster = persistent.sizes(nheads, head_dim, False, config)
            sizes = f"TssaSizes<bf16, {of_cluster}, {config['TOGETHER']}>"
            for seqlen in (1, 197, 784):
                share = -(-seqlen // (config["CLUSTER"] * config["TOGETHER"]))
                scratch = f"larger(min({share}, {sizes}::kSlice) * {sizes}::kRow, {sizes}::kGroups * {sizes}::kSums)"
                for backward, side in SIDES.items():
                    layout = f"TssaPersistentShared<{sizes}, {side}>({share}).scratch"
                    found = persistent.shared_bytes(nheads, head_dim, seqlen, backward, config)
                    yield f"4 * ({layout} + {scratch})", found


def steps_on_chip():
    for nheads, head_dim in WIDTHS:
        for config in (*walking.FORWARD.candidates, *walking.BACKWARD.candidates):
            if not config["CLUSTER"]:
                continue
            sizes = f"TssaSizes<bf16, {persistent.sizes(nheads, head_dim, False, config)}>"
            chunk = f"({config['TOKENS']} * {sizes}::kGroups)"
            of_vectors, of_groups = f"{chunk} * {sizes}::kRow", f"{sizes}::kGroups * {sizes}::kSums"
            forward = f"TssaWalkingShared<{sizes}>({chunk}).scratch + larger({of_vectors}, {of_groups})"
            backward = f"TssaWalkingBackShared<{sizes}>({chunk}).rows + {of_vectors}"
            yield f"4 * ({forward})", walking.shared_bytes(nheads, head_dim, False, config)
            yield f"4 * ({backward})", walking.shared_bytes(nheads, head_dim, True, config)


def any_tokens():
    for dtype in (torch.float32, torch.bfloat16):
        for nheads, head_dim in (*WIDTHS, (5, 7), (150, 3)):
            width, itemsize = nheads * head_dim, dtype.itemsize
            p = TssaProblem(nheads=nheads, head_dim=head_dim, width=width, chunk_size=29, dtype=DTYPES[dtype])
            made = f"problem({DTYPES[dtype]}, {nheads}, {head_dim}, 29)"
            yield f"tssa_reciprocals({made})", forms._reciprocals(p, False)
            for threads in (64, 256):
                yield f"tssa_scratch({made}, {threads})", forms._scratch(p, threads)
                for backward, side in SIDES.items():
                    found = forms._resident_bytes(p, itemsize, 17, threads, backward)
                    yield f"TssaResident({made}, 17, {threads}, {side}).bytes", found
            for count in (1, 4) if head_dim % 4 == 0 else (1,):
                yield f"TssaCausalShared({made}, {count}).bytes", forms._causal_bytes(p, count)
                for logits, side in SIDES.items():
                    found = forms.causal_backward_bytes(p, count, logits)
                    yield f"TssaCausalBackwardShared({made}, {count}, {side}).bytes", found


KINDS = {
    one.__name__.replace("_", "-"): dict(one())
    for one in (whole_heads, long_heads, fp32_products, sequences_on_chip, steps_on_chip, any_tokens)
}
PROGRAM = """
#include <cstdio>
using namespace crate_kernels;
using namespace crate_kernels::mssa;
long larger(long a, long b) { return a > b ? a : b; }
TssaProblem problem(int dtype, int nheads, int head_dim, int chunk_size) {
  TssaProblem p = {};
  p.dtype = static_cast<Dtype>(dtype), p.nheads = nheads, p.head_dim = head_dim, p.width = nheads * head_dim;
  p.chunk_size = chunk_size;
  return p;
}
"""


@pytest.fixture(scope="module")
def taken(tmp_path_factory):
    """Return what g++ makes of every expression."""
    reason = emulated.unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    folder, built = tmp_path_factory.mktemp("shared"), emulated.build().parent
    expressions = [one for kind in KINDS.values() for one in kind]
    lines = [f'  std::printf("%ld\\n", static_cast<long>({one}));' for one in expressions]
    source = "".join(f'#include "{header}"\n' for header in HEADERS) + PROGRAM
    source += "int main() {\n" + "\n".join(lines) + "\n}\n"
    (folder / "sizes.cpp").write_text(source)
    found = ["-include", str(built / "entry.h"), *emulated.searched(), "-I", str(libraries.source_folder())]
    made = [str(folder / "sizes.cpp"), "-o", str(folder / "sizes")]
    compiling.run([*shlex.split(get_cxx_compiler()), "-std=c++17", *found, *made])
    printed = subprocess.run([folder / "sizes"], capture_output=True, text=True, check=True).stdout
    return dict(zip(expressions, map(int, printed.split()), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_launch_asks_for_what_the_layout_takes(kind, taken):
    assert KINDS[kind]
    different = {one: (asked, taken[one]) for one, asked in KINDS[kind].items() if asked != taken[one]}
    assert not different
