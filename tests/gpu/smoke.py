"""The first minutes on a GPU: ``python -m tests.gpu.smoke --out FOLDER --seconds S --workers N``.

Items: the machine; the kernels of sm_90a in bf16; every form of every operator once in bf16 against float64, on each
kernel backend; how many clusters of tssa's kernels the GPU holds; generation by a captured step; persistent products,
and cuBLASLt's, a step of which is timed beside what the tables have; calls for which None takes what was timed to be
the fastest; the kernels of sm_90a in fp16; the assembler's warnings (C75xx) of the main Triton kernels; and, where
compute-sanitizer is, small calls under it.
"""

import faulthandler
import itertools
import os
import platform
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial

import torch

import crate_kernels
from crate_kernels import models, testing
from crate_kernels._core import backends, measured
from crate_kernels._cuda import launch as cuda_launch
from crate_kernels._triton import launch
from crate_kernels.bench import clock
from crate_kernels.ops.tssa.cuda import persistent as tssa_persistent
from crate_kernels.ops.tssa.cuda import walking as tssa_walking
from crate_kernels.ops.tssa.cuda.parameters import TssaBackward, TssaForward
from tests.gpu import lines, processes
from tests.gpu.suite import usable
from tests.ops.mssa import heads
from tests.ops.tssa import persistent, walking

LIMIT = 100  # seconds per item; then its process ends
BACKENDS = ("triton", "cpp")
# Kernels of sm_90a: mssa's; tssa's, with the case that runs under the sanitizer.
KINDS = {"heads": heads.Heads, "rows": heads.LongRows, "pairs": heads.LongPairs}
CLUSTERS = {
    "persistent": (persistent, persistent.Persistent, "odd-heads"),
    "walking": (walking, walking.Walking, "three-steps"),
}
TEXTS = ("crate_lm_base", "tost_lm_base", "aot_lm_mssa_base", "gpt2_base")  # a model of each cache
TOOLS = ("memcheck", "racecheck", "synccheck")  # of compute-sanitizer
# Clusters of tssa's kernels: heads, channels and tokens of ToST-S and of a language model; configurations.
OCCUPANCY = {
    "persistent": ((8, 48, 196), [persistent.config(c, b, t) for c in (4, 8) for b, t in ((2, 192), (1, 384))]),
    "walking": ((12, 64, 1024), [walking.EIGHT, walking.BACK, *(walking.config(c, 1, 192, 8) for c in (4, 8))]),
}
STREAMS = {  # steps of ista by persistent programs
    "relu": ("ista", (2, 1000, 384), {}),
    "soft": ("ista", (1, 777, 768), {"nonnegative": False}),
    "overcomplete": ("ista_overcomplete", (1, 777, 192, 768), {}),
}
QUERY = "name,driver_version,memory.total,clocks.max.sm,power.limit"


class Skipped(Exception):
    """An item that this machine has nothing for."""


def forms():
    """Return the largest case of each combination of options, padding, packing and special values."""
    found = {}
    for case in testing.CASES:
        kind = (case.op, frozenset(case.options), case.padding, bool(case.lengths), case.special)
        found[kind] = max(found.get(kind, case), case, key=lambda one: (sum(one.lengths), *one.shape[-2:]))
    return list(found.values())


def classes():
    """Return a call of each class in which this GPU takes another backend than the usual one, and its dtype."""
    for op, dtype, sizes, length, causal in measured.read(measured.gpu_name(torch.device("cuda"))):
        few = (1,) if testing.SPECS[op].package == "ista" else (1, 1)
        yield testing.Case(op, f"timed-{length}", (*few, length, *sizes), {"causal": True} if causal else {}), dtype


def describe():
    """Return the versions and what nvidia-smi says."""
    try:
        from triton import __version__ as triton
    except ImportError:
        triton = "none"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none: interpreted"
    versions = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton}
    smi = shutil.which("nvidia-smi")
    command = [smi, f"--query-gpu={QUERY}", "--format=csv,noheader"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip() if smi else "none"
    return {"gpu": gpu, **versions, "cuda": torch.version.cuda, "nvidia-smi": said}


def check(case, backend, dtype, device):
    """Compare one call with the error tolerance, by a backend or by None's choice; return its worst share of it."""
    if backend is not None:
        reason = backends.unavailable_reason(testing.SPECS[case.op].package, backend, torch.device(device))
        reason = reason or testing.excluded(case, backend, dtype, device)
        if reason is not None:
            raise Skipped(reason)
    inputs = testing.make_inputs(case, dtype, device)
    try:
        results = testing.run(case, inputs, backend)
    except NotImplementedError as missing:  # a form that only composite has
        raise Skipped(str(missing)) from None
    eager, exact = (testing.run(case, i, "reference") for i in (inputs, inputs.to(torch.float64)))
    found = testing.measure(results, eager, exact, dtype)
    wrong = [one.output for one in found if not one.passed]
    if wrong:
        raise AssertionError(f"{wrong} have errors beyond the tolerance: {found}")
    return {"share": round(max(one.share for one in found), 3)}


def hopper(kind, direction, case, dtype):
    """Compare a kernel of sm_90a, which nothing chooses by default, with the error tolerance; return the share."""
    if launch.arch(torch.device("cuda")) != "sm_90":
        raise Skipped("these kernels are for sm_90a")
    problem = kind(case, dtype, device="cuda")
    run, check = (
        (problem.run_forward, problem.check_forward) if direction == "forward" else (problem.run, problem.check)
    )
    *results, left = run()
    if any(left):
        raise AssertionError(f"heads {left} are left to other kernels")
    *again, _ = run()
    if kind is not heads.LongPairs and not all(map(torch.equal, results, again)):
        raise AssertionError("two runs differ in their bits")
    return {"share": round(check(*results), 3)}


def clusters(kind, case, dtype):
    """Compare kernels of tssa that nothing chooses by default with the error tolerance, and the bits of two runs."""
    if launch.arch(torch.device("cuda")) != "sm_90":
        raise Skipped("these kernels are for sm_90a")
    reason = backends.unavailable_reason("tssa", "cpp", torch.device("cuda"))
    if reason is not None:
        raise Skipped(reason)
    return {"share": round(kind(case).check("cpp", dtype, "cuda", twice=True), 3)}


def occupancy(kind, config, nheads, head_dim, seqlen, device="cuda"):
    """Return how many clusters of a configuration the GPU holds at once, forward and backward, where these fit."""
    device, sizes, found = torch.device(device), (nheads, head_dim), {}
    reason = backends.unavailable_reason("tssa", "cpp", device)
    gpu = None if reason else cuda_launch.gpu(device)
    if gpu is None or gpu.capability != tssa_persistent.CAPABILITY:
        raise Skipped(reason or "these kernels are for sm_90a")
    planner, tokens = (tssa_walking, ()) if kind == "walking" else (tssa_persistent, (seqlen,))
    for backward, record in ((False, TssaForward), (True, TssaBackward)):
        bytes_ = planner.shared_bytes(*sizes, *tokens, backward, config)
        block = tssa_persistent.block_of(nheads * head_dim, bytes_, config, gpu)
        if block is None:
            continue
        kernel = planner.kernel(torch.bfloat16, *sizes, False, backward, config)
        shape = block._replace(blocks=gpu.multiprocessors * block.cluster)
        found[record.__name__] = gpu.active_clusters(cuda_launch.function(kernel, device, (record,)), shape)
    if not found or not all(found.values()):
        raise AssertionError(f"the GPU holds no cluster: {found}")
    return {"clusters": found}


def generation(name, device="cuda", **sizes):
    """Compare the tokens of replayed steps of generation with those of called ones; in fp32, where ties are rare."""
    torch.manual_seed(0)
    model = models.create(name, n_layer=2, block_size=128, **sizes).to(device)
    prompts = [torch.randint(model.config.vocab_size, (size,), device=device) for size in (9, 30, 17)]
    called, replayed = (model.generate(prompts, 60, temperature=0, cuda_graph=graph) for graph in (False, True))
    if not all(map(torch.equal, called, replayed)):
        raise AssertionError("replayed tokens differ from those of called steps")
    return {"tokens": 60 * len(prompts)}


def stream(name, device="cuda"):
    """Compare a step with products by persistent programs, which no table takes, with the error tolerance."""
    if device == "cuda" and launch.arch(torch.device(device)) not in ("sm_90", "sm_100"):
        raise Skipped("persistent products are for sm_90 and sm_100")
    from crate_kernels._triton.table import forced
    from crate_kernels.ops.ista.triton import tables

    op, shape, options = STREAMS[name]
    with forced(tables.PRODUCT, tables.STREAM):
        dtype = torch.bfloat16 if device == "cuda" else torch.float16
        return check(testing.Case(op, f"stream-{name}", shape, options), "triton", dtype, device)


@contextmanager
def cublaslt(taken=1):
    """Let every product that cuBLASLt serves be its, which no table takes, or none."""
    from crate_kernels._triton.table import forced
    from crate_kernels.ops.ista import lt
    from crate_kernels.ops.ista.triton import tables

    with forced(tables.LINEAR, {"LT": taken}), forced(tables.GATED, {"LT": taken}):
        yield
    if lt._said:
        raise AssertionError(f"cuBLASLt did not multiply: {lt._said}")


def by_lt(name, dtype, device="cuda"):
    """Compare a step by cuBLASLt's products with the error tolerance."""
    op, shape, options = STREAMS[name]
    with cublaslt():
        return check(testing.Case(op, f"lt-{name}", shape, options), "triton", dtype, device)


def beside_lt(shape=(25216, 768, 3072), device="cuda", rounds=10):
    """Time a training step of ista_overcomplete as the tables have it and by cuBLASLt, in ms; capture the latter."""
    tokens, *sizes = shape
    x, dout = (torch.randn(tokens, sizes[0], device=device).bfloat16() for _ in range(2))
    inputs = [x, *(torch.randn(sizes, device=device).bfloat16() * sizes[0] ** -0.5 for _ in range(2))]

    def step():
        out = crate_kernels.ista_overcomplete(*(t.requires_grad_() for t in inputs), backend="triton")
        return torch.autograd.grad(out, inputs, dout)

    found = {}
    for name, taken in (("tables", 0), ("cublaslt", 1)):
        with cublaslt(taken):
            milliseconds = [1e3 * clock.once(step, tuple, torch.device(device)) for _ in range(rounds + 2)]
            found[name] = round(min(milliseconds[2:]), 3)
            if taken and device == "cuda" and clock._capture_graph(step, tuple, torch.device(device)) is None:
                raise AssertionError("a step by cuBLASLt cannot be captured in a CUDA graph")
    return found


def warnings(family):
    """Return the assembler's warnings about a family's products on this GPU's architecture, and its spills."""
    from tests.tools.aot import report

    target = launch.arch(torch.device("cuda"))
    if target not in report.TARGETS:
        raise Skipped(f"kernels are compiled for {', '.join(report.TARGETS)}, this is {target}")
    kernels = [kernel for kernel, _ in report.family(family, target)]
    said = {kernel["kernel"]: kernel["warnings"] for kernel in kernels if kernel["warnings"]}
    if said:
        raise AssertionError(f"the assembler warns: {said}")
    return {"stack": max(kernel["spills"] for kernel in kernels)}


def sanitize(op, backend, what=None, tool="memcheck"):
    """Run one small call under a tool of compute-sanitizer; ``what``: of kernels that nothing takes by default."""
    if what is not None and launch.arch(torch.device("cuda")) != "sm_90":
        raise Skipped(f"{what} kernels are for sm_90a")
    reason = backends.unavailable_reason(op, backend, "cuda")
    if reason is not None:
        raise Skipped(reason)
    found = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if found is None:
        raise Skipped("compute-sanitizer is not there")
    command = [found, "--tool", tool, "--error-exitcode", "9", sys.executable]
    command += ["-c", f"from tests.gpu import smoke; smoke.call({what or op!r}, {backend!r})"]
    seconds = LIMIT - 10
    try:
        done = subprocess.run(command, cwd=processes.ROOT, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"one small call did not end within {seconds} s under compute-sanitizer") from None
    if done.returncode:
        raise AssertionError((done.stdout + done.stderr)[-3000:])
    return {"said": done.stdout[-200:]}


def of_hopper(dtype):
    """Return the items of the kernels of sm_90a in one dtype; no GPU has run these, so they come first."""
    found, name = {}, str(dtype).removeprefix("torch.")
    every = (
        ("heads backward", heads.Heads, heads.CASES),
        ("rows backward", heads.LongRows, heads.LongRows.cases),
        ("pairs backward", heads.LongPairs, heads.LongPairs.cases),
        ("heads forward", heads.Heads, heads.Heads.cases),
        ("rows forward", heads.LongRows, heads.LONG_CASES),
    )
    for what, kind, cases in every:
        for case in cases:
            found[f"{what} {case} {name}"] = partial(hopper, kind, what.split()[1], case, dtype)
    for what, (module, kind, _) in CLUSTERS.items():
        for case in {**module.CASES, **module.MORE}:
            found[f"{what} {case} {name}"] = partial(clusters, kind, case, dtype)
    return found


def items(dry_run):
    """Return the items by name, in the order in which they run."""
    if dry_run:
        case = next(case for case in testing.CASES if case.op == "tssa")
        return {"machine": describe, f"triton {case}": lambda: check(case, "triton", torch.float32, "cpu")}
    found = {"machine": describe} | of_hopper(torch.bfloat16)
    for case in forms():
        for backend in BACKENDS:
            found[f"{backend} {case}"] = lambda case=case, backend=backend: check(case, backend, torch.bfloat16, "cuda")
    for kind, (sizes, configs) in OCCUPANCY.items():
        for config in configs:
            name = f"occupancy {kind} {' '.join(map(str, config.values()))}"
            found[name] = partial(occupancy, kind, config, *sizes)
    found |= {f"generation {name}": partial(generation, name) for name in TEXTS}
    found |= {f"stream {name}": partial(stream, name) for name in STREAMS}
    for dtype in (torch.bfloat16, torch.float16):
        found |= {f"lt {name} {dtype}".replace("torch.", ""): partial(by_lt, name, dtype) for name in STREAMS}
    found["lt beside"] = beside_lt
    found |= {
        f"none {case}": lambda case=case, dtype=dtype: check(case, None, dtype, "cuda") for case, dtype in classes()
    }
    found |= of_hopper(torch.float16)
    try:
        from tests.tools.aot.families import FAMILIES
    except ImportError:  # no Triton
        return found
    found |= {f"warnings {family}": lambda family=family: warnings(family) for family in FAMILIES}
    for op in backends.OPS:
        for backend in BACKENDS:
            found[f"sanitizer {backend} {op}"] = lambda op=op, backend=backend: sanitize(op, backend)
    for op, kinds in (("tssa", CLUSTERS), ("mssa", KINDS)):
        for what, tool in itertools.product(kinds, TOOLS):
            found[f"sanitizer cpp {op} {what} {tool}"] = partial(sanitize, op, "cpp", what, tool)
    return found


def work(path, items, deadline, limit=LIMIT):
    """Run items, each for at most ``limit`` seconds, append their results to a file and return the exit status."""
    before = lines.results(path)
    for name, item in items:
        if name in before and before[name]["outcome"] != "skipped":
            continue
        if time.monotonic() > deadline:
            return processes.INCOMPLETE
        lines.append(path, item=name, outcome="started")
        faulthandler.dump_traceback_later(limit, exit=True, file=sys.__stderr__)
        start = time.monotonic()
        try:
            said = {"outcome": "passed", **item()}
        except Skipped as reason:
            said = {"outcome": "skipped", "reason": str(reason)}
        except Exception as error:
            said = {"outcome": "failed", "error": f"{type(error).__name__}: {error}"[-4000:]}
        faulthandler.cancel_dump_traceback_later()
        lines.append(path, item=name, seconds=round(time.monotonic() - start, 3), **said)
        if said["outcome"] == "failed" and not usable():
            os._exit(70)
    return processes.DONE


def call(op, backend):
    """Make one small call, forward and backward."""
    if op in CLUSTERS:
        _, kind, case = CLUSTERS[op]
        kind(case).check(backend, torch.bfloat16, "cuda")
        return
    if op in KINDS:
        problem = KINDS[op]("causal-padded", torch.bfloat16, device="cuda")
        if op != "pairs":  # a backward alone
            problem.run_forward()
        problem.run()
        torch.cuda.synchronize()
        return
    case = next(case for case in forms() if testing.SPECS[case.op].package == op)
    testing.run(case, testing.make_inputs(case, torch.bfloat16, "cuda"), backend)
    torch.cuda.synchronize()


def main(argv=None):
    args = processes.parser(__doc__).parse_args(argv)
    path, deadline = args.out / "smoke.jsonl", time.monotonic() + args.seconds
    worker = 1 if args.workers == 1 else args.worker
    if worker is not None:
        status = work(path, [*items(args.dry_run).items()][worker - 1 :: args.workers], deadline)
    else:
        status = processes.shared("smoke", args, deadline)
    return processes.finished(path, status)


if __name__ == "__main__":
    sys.exit(main())
