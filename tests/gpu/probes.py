"""What sm_90a computes and how fast: ``python -m tests.gpu.probes --out FOLDER --seconds S``.

Items: bits of products of warp groups in every layout, of matrix loads and stores, bulk copies, adds and conversions,
compared with the CPU; the clocks of an instruction, by the multiprocessor's clock; and the rate of ``red.v4``, which
adds four numbers in global memory, beside plain stores. Other GPUs have none of it.
"""

import statistics
import sys
import time
from ctypes import c_int, c_int64
from functools import partial

import torch

from crate_kernels._cuda import launch, records
from crate_kernels._cuda.sources import Kernel
from crate_kernels._native.driver import Shape
from tests.gpu import processes, smoke

LIMIT = 30  # seconds per item, compilation included
BITS, CLOCKS = "../tests/gpu/probes.cuh", "../tests/gpu/clocks.cuh"  # from csrc, as headers are named
SWIZZLES = {"none": 0, "128": 1, "64": 2, "32": 3}  # bytes
FORMS = {"k,k": 0, "mn,k": 1, "k,mn": 2, "mn,mn": 3, "registers,k": 4, "registers,mn": 6}  # as probes.cuh numbers them
WIDTHS = ((torch.bfloat16, 8), (torch.bfloat16, 16), (torch.bfloat16, 64), (torch.bfloat16, 128), (torch.float16, 64))
FEW, MANY, ROUNDS = 8, 40, 6  # as in clocks.cuh
SHARED = 25 * 1024  # bytes of a block
# What is timed: the numbers of threads, and the instruction in machine code.
TIMED = {
    "Power<1>": ((32,), "MUFU.EX2"),
    "Power<8>": ((32, 128), "MUFU.EX2"),
    "Fma<1>": ((32,), "FFMA"),
    "Fma<8>": ((32, 128), "FFMA"),
    "Product<8, 1, false>": ((128,), "HGMMA.64x8x16"),
    "Product<16, 1, false>": ((128,), "HGMMA.64x16x16"),
    "Product<64, 1, false>": ((128, 256), "HGMMA.64x64x16"),
    "Product<64, 2, false>": ((128, 256), "HGMMA.64x64x16"),
    "Product<64, 1, true>": ((128,), "HGMMA.64x64x16"),
    "Product<128, 1, false>": ((128,), "HGMMA.64x128x16"),
    "Load": ((32, 128), "LDSM"),
    "Store": ((32, 128), "STSM"),
    "Barrier": ((128, 256), "BAR.SYNC"),
    "Phase<false>": ((128,), "SYNCS.PHASECHK"),
    "Phase<true>": ((128,), "SYNCS.PHASECHK"),
}
PLACES = {"64 KiB": 1 << 12, "16 MiB": 1 << 20, "512 MiB": 1 << 25}  # of 16 bytes
TIMES, REPEATS = 1 << 26, 5  # stores or adds of 16 bytes, launches


def run(name, shape, *parameters, header=BITS):
    """Launch a kernel on the device of its first parameter."""
    launch.run(Kernel(header, f"probe::{name}"), shape, parameters, parameters[0].device)


def check_device(device):
    """Skip an item where the kernels cannot run; tests run those of bits under the emulator."""
    if device.type not in launch.OPENERS:
        raise smoke.Skipped("probes need a GPU")
    if launch.gpu(device).capability != 90:
        raise smoke.Skipped(f"probes are for sm_90a, this is sm_{launch.gpu(device).capability}")


def same(got, expected):
    """Return the outcome of bits, with the first number that differs, or the last."""
    wrong = (got != expected.to(got.device)).flatten()
    place = int(wrong.nonzero()[0]) if wrong.any() else wrong.numel() - 1
    values = {"got": got.flatten()[place].item(), "expected": expected.flatten()[place].item()}
    return {"outcome": "failed" if wrong.any() else "passed", **values, "place": place, "wrong": int(wrong.sum())}


def multiply(a, b, swizzle, form, unused, device):
    """Return a b^T by products of a warp group."""
    out = torch.full((64, len(b)), torch.nan, device=device)
    name = f"product_kernel<{records.CPP_TYPES[a.dtype]}, {len(b)}>"
    inputs = (a.to(device), b.to(device), out, *(c_int(number) for number in (swizzle, form, unused)))
    run(name, Shape(1, 128, (64 + len(b)) * 128), *inputs)
    return out


def product(dtype, columns, swizzle, form, unused, device):
    """Multiply whole numbers, whose products are exact."""
    generator = torch.Generator().manual_seed(columns)
    a, b = (torch.randint(-8, 9, (rows, 64), generator=generator).to(dtype) for rows in (64, columns))
    return same(multiply(a, b, swizzle, form, unused, device), (a.double() @ b.double().t()).float())


def guard_bits(device):
    """Tell how many bits below the last of a sum a product keeps: row g is 1 and 2^g numbers of 2^(-23 - g)."""
    a = torch.zeros(64, 64)
    for g in range(4):
        a[g, 0], a[g, 1 : 1 + 2**g] = 1.0, 2.0 ** (-23 - g)
    sums = multiply(a.bfloat16(), torch.ones(8, 64).bfloat16(), 0, 0, 0, device)[:4, 0]
    kept = (sums == 1 + 2.0**-23).tolist()
    return {"outcome": "measured", "got": kept, "expected": [True] * 4}


def matrices(device):
    """Compare the registers of a matrix load, and what both stores make of them, with the places in PTX's manual."""
    values = torch.arange(256, dtype=torch.int16).view(4, 8, 8)
    out = torch.zeros(3, 256, dtype=torch.int16, device=device)
    run("matrices_kernel", Shape(1, 32, 3 * 512), values.to(device), out)
    loaded = values.view(4, 32, 2).transpose(0, 1)  # lane, matrix, pair
    return same(out, torch.stack([x.reshape(256) for x in (loaded, values, values.transpose(1, 2))]))


def copies(device):
    """Compare bulk copies in two phases, a bulk sum and sums of four numbers with whole numbers."""
    values, sums = torch.arange(128.0), torch.arange(132.0)
    expected = sums + torch.cat([values, torch.tensor([32.0, 496.0, -496.0, 16.0])])
    sums = sums.to(device)
    run("copies_kernel", Shape(1, 32, 528), values.to(device), sums)
    return same(sums, expected)


def numbers(x, device):
    """Return what the hardware's functions and conversions make of fp32 numbers."""
    out = torch.empty(7, len(x), device=device)
    run("numbers_kernel", Shape(-(-len(x) // 128), 128), x.to(device), out, c_int(len(x)))
    return out.cpu()


def function(place, exact, bounds, unit, device):
    """Check a function's error: at most so many units of the last place, or 2^-22 where there is no unit."""
    x = torch.linspace(bounds[0], bounds[1], 4099)
    expected = exact(x.double())
    error = (numbers(x, device)[place].double() - expected).abs()
    share = (error / (unit * 2.0 ** (expected.abs().log2().floor() - 23) if unit else 2.0**-22)).max().item()
    return {"outcome": "passed" if share <= 1 else "failed", "got": round(share, 4), "expected": "at most 1"}


def conversion(places, make, device):
    """Compare conversions of x and -x to bf16 and fp16 with PyTorch's bits."""
    x = torch.linspace(-2, 2, 4098).bfloat16().float() if make is squares else torch.linspace(-2, 2, 4098)
    pairs = torch.stack([x, -x], 1)
    expected = [make(pairs.to(dtype)).view(torch.int32).view(-1) for dtype in (torch.bfloat16, torch.float16)]
    return same(numbers(x, device)[places].view(torch.int32), torch.stack(expected))


def squares(halves):
    """Return 1 + x^2, exact in fp32 for the numbers of a few bits that it is made of, and rounded once."""
    return (1 + halves.float() ** 2).to(halves.dtype)


def clocks(name, threads, device):
    """Return the clocks of an instruction of each warp, from runs of few and of many, in one block."""
    found = torch.zeros(ROUNDS, 2, dtype=torch.int64, device=device)
    run(f"clocks_kernel<probe::{name}>", Shape(1, threads, SHARED), found, header=CLOCKS)
    rounds = found.tolist()
    each = [(many - few) / (MANY - FEW) for few, many in rounds[1:]]
    figures = {"clocks": min(each), "median": statistics.median(each), "rounds": rounds}
    return {"outcome": "measured", "instruction": TIMED[name][1], **figures}


def fill(adds, to, times):
    """Store four numbers in one place after another, or add them to what is there."""
    shape = Shape(8 * launch.gpu(to.device).multiprocessors, 256)
    run(f"rate_kernel<{str(adds).lower()}>", shape, to, c_int64(times), c_int64(len(to) - 1))


def filled(to, count):
    """Check places for four numbers stored, or added ``count`` times."""
    return same(to, torch.tensor([1.0, 2.0, 3.0, 4.0], device=to.device).mul(count).expand(len(to), 4))


def rate(adds, places, device):
    """Return the bytes a second of stores or adds of four numbers by the whole device."""
    to, seconds = torch.zeros(places, 4, device=device), []
    for _ in range(REPEATS + 1):  # the first is a warm-up
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        fill(adds, to, TIMES)
        stop.record()
        torch.cuda.synchronize(device)
        seconds.append(start.elapsed_time(stop) / 1e3)
    found = filled(to, (REPEATS + 1) * TIMES // places if adds else 1)
    return {**found, "bytes_per_second": 16 * TIMES / min(seconds[1:]), "seconds": seconds[1:]}


def fits(columns, swizzle, form):
    """Return whether an operand of so many columns has rows as long as a swizzle."""
    if SWIZZLES[swizzle] == 0:
        return not form & 3
    return not form & 2 or 2 * columns >= int(swizzle)


def products():
    """Yield the name and the arguments of each product."""
    for dtype, columns in WIDTHS:
        for swizzle, number in SWIZZLES.items():
            for majors, form in FORMS.items():
                if fits(columns, swizzle, form):
                    name = f"product {str(dtype).removeprefix('torch.')} {columns} {swizzle} {majors}"
                    yield name, (dtype, columns, number, form, 0)
    # The leading bytes of a K-major operand with a swizzle do not count.
    for swizzle in ("128", "64", "32"):
        yield f"unused bits {swizzle}", (torch.bfloat16, 64, SWIZZLES[swizzle], 0, 0x3FFF0)


FUNCTIONS = {
    "power": (0, torch.exp2, (-126.0, 127.0), 2),
    "inverse": (1, torch.reciprocal, (0.5, 2.0), 1),
    "logarithm": (2, torch.log2, (0.5, 2.0), None),
}
CONVERSIONS = {"pairs": (slice(3, 5), lambda halves: halves), "squares": (slice(5, 7), squares)}


def bits():
    """Return the items of bits by name; each takes a device."""
    found = {name: partial(product, *arguments) for name, arguments in products()}
    found |= {"guard bits": guard_bits, "matrices": matrices, "copies": copies}
    found |= {name: partial(function, *arguments) for name, arguments in FUNCTIONS.items()}
    return found | {name: partial(conversion, *arguments) for name, arguments in CONVERSIONS.items()}


def items(device):
    """List names and items, in the order in which they run."""
    found = bits()
    for name, (threads, _) in TIMED.items():
        found |= {f"clocks {name} {count}": partial(clocks, name, count) for count in threads}
    for size, places in PLACES.items():
        found |= {f"{'red.v4' if adds else 'stores'} {size}": partial(rate, adds, places) for adds in (False, True)}

    def on(item):
        check_device(device)
        return item(device)

    return [(name, partial(on, item)) for name, item in found.items()]


def main(argv=None):
    args = processes.parser(__doc__).parse_args(argv)  # of the workers, none: clocks are read alone
    args.out.mkdir(parents=True, exist_ok=True)
    path, device = args.out / "probes.jsonl", torch.device("cpu" if args.dry_run else "cuda:0")
    status = smoke.work(path, items(device), time.monotonic() + args.seconds, LIMIT)
    return processes.finished(path, status)


if __name__ == "__main__":
    sys.exit(main())
