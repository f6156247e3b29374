"""Every access to tokens moves 16 bytes of a thread, or all that a thread has of a small tile.

Other accesses are of numbers by row, head or block: NUMBERS names the functions that make them, each with a reason.
"""

import ast
import functools
import re
from pathlib import Path

import pytest
import torch

from tests.tools.aot import harness

harness.needs_compiler()

from tests.ops.ista import aot as ista  # noqa: E402  # only where Triton compiles
from tests.ops.mssa import aot as mssa  # noqa: E402
from tests.ops.tssa import aot as tssa  # noqa: E402
from tests.tools.aot import families, listing, tiles  # noqa: E402

HALF, FP16, SINGLE = torch.bfloat16, torch.float16, torch.float32
NUMBERS = {
    "jit.sequence_bounds": "two offsets of a packed sequence",
    "mssa.backward._mssa_bwd_kernel": "the shift of a head",
    "mssa.decode._mssa_combine_kernel": "lse of a row, by parts of the keys",
    "mssa.decode._space": "the length of a cache",
    "mssa.delta._mssa_bwd_delta_kernel": "lse, its exponential and delta of a row",
    "mssa.delta.delta_of_rows": "lse of a row",
    "mssa.divided._mssa_bwd_divide_kernel": "lse, a factor and delta of a row",
    "mssa.divided._range_of_head": "lse of a row",
    "mssa.divided.raised_shift": "the shift of a head",
    "mssa.forward._mssa_norms_kernel": "the largest norm of a block",
    "mssa.head.allowed": "a byte of the padding mask, by key",
    "mssa.head.largest": "a number of a block",
    "mssa.head.scores_of": "the seed",
    "mssa.raised.note_norms": "two norms of a block",
    "mssa.rectangular._scores_of_range": "the seed",
    "mssa.rows.finish": "lse of a row",
    "mssa.terms.load_number": "lse, delta or dlse of a row",
    "mssa.tile.zero_numbers": "lse of a row",
    "tssa.causal._tssa_causal_fwd_kernel": "the bias by head and token, and the length of a cache",
    "tssa.causal_backward._tssa_causal_bwd_kernel": "a number by head and token",
    "tssa.causal_bias._tssa_causal_dbias_kernel": "a number by head and token, of packed sequences from any token on",
    "tssa.full.channel_gate": "the seed",
    "tssa.tile.add_heads": "a number by head",
    "tssa.tile.kept": "a byte of the padding mask, by token",
    "tssa.tile.dropped": "the seed",
    "tssa.tile.load_heads": "a number by head",
    "tssa.tile.load_rows": "a number by head and token",
    "tssa.tile.store_heads": "a number by head",
    "tssa.tile.store_rows": "a number by head and token",
}
MASKS = {"padded": {"padded": True}, "packed": {"packed": True}, "dropout": {"dropout_p": 0.1}}
CALLS = {
    **{name: family.call for name, family in families.FAMILIES.items()},
    **{
        f"mssa_{what}-d{head_dim}-{name}": make(1000, head_dim, **options)
        for what, make in (("forward", mssa.forward), ("backward", mssa.backward))
        for head_dim in (48, 64)
        for name, options in {**MASKS, "plain": {}, "causal": {"causal": True}}.items()
    },
    **{
        f"mssa_{what}-d{head_dim}-{str(dtype)[6:]}": make(1024, head_dim, dtype)
        for what, make in (("forward", mssa.forward), ("backward", mssa.backward))
        for head_dim, dtype in ((64, FP16), (128, FP16), (64, SINGLE), (96, HALF))
    },
    "mssa_backward-threshold": mssa.backward(1024, 64, threshold=0.6, dlse=True),
    "mssa_prompt-d64": mssa.decode(512, 64),
    **{
        f"mssa_ranges_{'backward' if back else 'forward'}-d{head_dim}-{str(dtype)[6:]}{'-causal' * causal}": (
            mssa.between(back, 4096, head_dim, dtype, causal=causal)
        )
        for back in (False, True)
        for causal in (False, True)
        for head_dim, dtype in ((64, HALF), (64, FP16), (128, FP16), (64, SINGLE))
    },
    "mssa_ranges_backward-padded-dropout": mssa.between(True, 4096, 64, padded=True, dropout_p=0.1),
    **{f"mssa_ranges_delta-d{head_dim}": mssa.delta(4096, head_dim) for head_dim in (64, 128)},
    **{f"tssa_whole-8x48-{str(dtype)[6:]}": tssa.full(196, 8, 48, dtype) for dtype in (HALF, FP16, SINGLE)},
    **{f"tssa_whole-8x48-{name}": tssa.full(196, 8, 48, **options) for name, options in MASKS.items()},
    **{f"tssa_full-12x64-{name}": tssa.full(4096, 12, 64, batch=16, **options) for name, options in MASKS.items()},
    **{f"tssa_causal-12x64-{name}": tssa.causal(1024, 12, 64, **options) for name, options in MASKS.items()},
    **{f"tssa_causal-12x64-{str(dtype)[6:]}": tssa.causal(1024, 12, 64, dtype) for dtype in (FP16, SINGLE)},
    **{f"tssa_decode-12x64-{str(dtype)[6:]}": tssa.decode(1, 12, 64, dtype) for dtype in (HALF, FP16, SINGLE)},
    "tssa_prompt-12x64-padded": tssa.decode(512, 12, 64, padded=True),
    **{f"ista-d768-{str(dtype)[6:]}": ista.step(12608, 768, dtype) for dtype in (FP16, SINGLE)},
    "ista-d768-autocast": ista.step(12608, 768, SINGLE, HALF),
    "ista-d768-few": ista.step(197, 768),
    "ista-d768-one": ista.step(1, 768),
    "ista-d768-stream": ista.streamed(12608, 768),
    **{
        f"ista_overcomplete-d384-{str(dtype)[6:]}": ista.overcomplete(12608, 384, 1536, dtype)
        for dtype in (HALF, SINGLE)
    },
    "ista_bits": ista.gated(25216, 96),
}
QUICK = ("ista-d768", "tssa_decode-12x64-bfloat16", "mssa_ranges_backward-d64-n4096")


@functools.cache
def _functions(path):
    """List (first line, last line, name) of the functions in a file."""
    return [
        (node.lineno, node.end_lineno, node.name)
        for node in ast.walk(ast.parse(Path(path).read_text()))
        if isinstance(node, ast.FunctionDef)
    ]


def _function(source):
    """Name the function that has a line: its operator, its file without folders named triton, and its name."""
    path, line = source
    name = max(each for each in _functions(path) if each[0] <= line <= each[1])[2]
    folders = [each for each in Path(path).with_suffix("").parts if each != "triton"]
    inside = folders[folders.index("ops") + 1 :] if "ops" in folders else folders[-1:]
    return ".".join([*inside, name])


def _faults(launch, target):
    """List the narrow accesses of a launch: (kernel, function, instruction)."""
    bits = tiles.thread_bits(harness.assemble(launch, target).compiled.asm["ttgir"])
    narrow = [one for one in listing.accesses(harness.listed(launch, target)) if listing.width(one) < 128]
    return {
        (launch.function.__name__, _function(one.source), one.opcode)
        for one in narrow
        if listing.width(one) not in bits.get(one.source, ()) and _function(one.source) not in NUMBERS
    }


@pytest.mark.parametrize(
    ("name", "target"),
    [
        pytest.param(
            name,
            target,
            id=f"{name}-{target}",
            marks=() if name in QUICK and target == "sm_90" else pytest.mark.exhaustive,
        )
        for target in harness.STRICT
        for name in CALLS
    ],
)
def test_kernels_move_16_bytes_of_a_thread_at_once(name, target):
    launches = harness.launches(CALLS[name], target)
    assert launches
    assert set().union(*(_faults(each, target) for each in launches)) == set()


def test_every_kernel_is_launched_by_some_call():
    """A new one needs a call here."""
    package, decorated = (
        harness.ROOT / "crate_kernels",
        re.compile(r"^@triton\.jit.*\n(?:#.*\n)*def (_\w+_kernel)\(", re.M),
    )
    kernels = {name for path in package.glob("**/*.py") for name in decorated.findall(path.read_text())}
    launched = {each.function.__name__ for call in CALLS.values() for each in harness.launches(call, "sm_90")}
    assert launched == kernels


def test_functions_of_numbers_exist():
    package = harness.ROOT / "crate_kernels"
    paths = [path for path in package.glob("**/*.py") if "triton" in str(path.relative_to(package))]
    assert NUMBERS.keys() <= {_function((str(path), each[0])) for path in paths for each in _functions(str(path))}
