"""Bounds of the main kernels from their machine code, without a GPU: no number here is a measurement.

``python -m tests.tools.aot.report --kernel mssa_forward-d64-n16384 --target sm_90`` prints every loop of one kernel;
``--out FOLDER`` writes the cubins of all, and their figures as JSON and as a table.
"""

import argparse
import json
import re
import sys
from pathlib import Path

import triton

from tests.tools.aot import cuda, families, figures, harness
from tests.tools.sass import disassembler, kernel

VERSION = ".".join(triton.__version__.split(".")[:2])
TARGETS = ("sm_80", "sm_90", "sm_100")
_PIPES = ("issue", "tensor", "mufu", "fp32", "alu", "imad", "half", "double", "shared", "shuffle")


def step(launch):
    """Name a launch: its function, and the steps of it that its constants switch on."""
    constants = {}
    for name, value in launch.arguments.items():
        constants |= value._asdict() if hasattr(value, "_asdict") else {name: value}
    switched = [k.lower() for k, v in constants.items() if v is True and k.isupper()]
    return "-".join([launch.function.__name__.strip("_").removesuffix("_kernel"), *switched])


def examine(launch, target):
    """Return (bounds of a launch, its cubin, the numbers of the assembler's warnings about warp-group products)."""
    assembled = harness.assemble(launch, target)
    compiled = assembled.compiled
    registers, stack = harness.nvidia_resources(compiled)
    build = kernel.Build(target, registers, compiled.metadata.shared, compiled.metadata.num_warps, stack)
    (function,) = [f for f in disassembler.functions(compiled.asm["cubin"]) if f.name == launch.function.__name__]
    warnings = sorted(set(re.findall(r"C75\d\d", assembled.report)))
    return (
        kernel.bounds(function, build, families.inner_trips(launch), families.traffic(launch)),
        compiled.asm["cubin"],
        warnings,
    )


def _rounded(number):
    return None if number is None else round(number, 3)


def row(bound):
    """Return a loop's figures as plain numbers."""
    costs = bound.costs
    return {
        "loop": bound.label,
        "depth": bound.depth,
        "instructions": round(costs.instructions),
        "clocks": {pipe: round(costs.clocks[pipe]) for pipe in _PIPES if costs.clocks[pipe]},
        "memory": round(bound.memory),
        "ratio": _rounded(bound.ratio),
        "pressure": _rounded(bound.pressure),
        "in_flight": bound.in_flight,
        **{name: round(getattr(costs, name)) for name in ("waits", "serialised", "barriers", "narrow", "guarded")},
        "spills": round(costs.spills),
        "unknown": round(costs.unknown),
        "mnemonics": dict(costs.mnemonics.most_common(12)),
    }


def record(name, found, warnings):
    """Return a kernel's figures as plain numbers."""
    build = found.build
    return {
        "kernel": name,
        "warps": build.warps,
        "registers": build.registers,
        "stack": build.stack,
        "shared": build.shared,
        "blocks": found.blocks,
        "instructions": found.instructions,
        "warnings": warnings,
        "main": row(found.main),
        "loops": [row(bound) for bound in found.loops],
    }


def family(name, target):
    """Return the figures and cubins of a family's kernels, the main kernel first."""
    every = []
    for launch in families.launches(name, target, harness.launches):
        found, cubin, warnings = examine(launch, target)
        every.append((record(step(launch), found, warnings), cubin))
    return sorted(every, key=lambda pair: _weight(pair[0]), reverse=True)


def _weight(kernel):
    clocks = kernel["main"]["clocks"]
    return clocks.get("tensor", 0), clocks["issue"]


def table(report):
    """Return the Markdown table of a report: a row per kernel."""
    head = (
        "| family | kernel | registers | blocks | loop | issue | tensor | mufu | alu | fp32 | shared | issue / floor | "
    )
    head += "memory share | KB in flight | waits | serialised | warnings |"
    lines = [head, "|" + " --- |" * (head.count("|") - 1)]
    for name, kernels in report.items():
        for each in kernels:
            main_loop = each["main"]
            clocks = [main_loop["clocks"].get(pipe, 0) for pipe in ("issue", "tensor", "mufu", "alu", "fp32", "shared")]
            ratios = ["" if main_loop[key] is None else f"{main_loop[key]:.2f}" for key in ("ratio", "pressure")]
            cells = [name, f"`{each['kernel']}`", each["registers"], each["blocks"], main_loop["instructions"], *clocks]
            cells += [*ratios, f"{main_loop['in_flight'] / 1024:.0f}"]
            cells += [main_loop["waits"], main_loop["serialised"], " ".join(each["warnings"])]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def show(kernels):
    """Print every loop of a family's kernels."""
    for each in kernels:
        print(", ".join(f"{k} {each[k]}" for k in ("kernel", "warps", "registers", "stack", "shared", "blocks")))
        print("  assembler:", " ".join(each["warnings"]) or "no warning of warp-group products")
        main_loop = each["main"]
        for loop in [main_loop if one["loop"] == main_loop["loop"] else one for one in each["loops"]] or [main_loop]:
            main_mark = "*" if loop["loop"] == each["main"]["loop"] else " "
            print(f"{main_mark} {'  ' * loop['depth']}{loop['loop']}: {loop['instructions']} instructions,", end=" ")
            print(", ".join(f"{pipe} {n}" for pipe, n in loop["clocks"].items()))
            rest = ("ratio", "pressure", "in_flight", "waits", "serialised", "barriers", "narrow", "guarded")
            print("    ", ", ".join(f"{k} {loop[k]}" for k in (*rest, "spills", "unknown") if loop[k]))
            print("    ", " ".join(f"{name}:{n}" for name, n in loop["mnemonics"].items()))


def of_cuda(part, target):
    """Return (figures by family, cubins by name) of the CUDA C++ kernels."""
    report, cubins = {}, {}
    for name, function, found, cubin in cuda.kernels(target):
        if part in name:
            report.setdefault(name, []).append(record(function, found, []))
            cubins[f"{name}-{target}"] = cubin
    return {name: sorted(kernels, key=_weight, reverse=True) for name, kernels in report.items()}, cubins


def of_triton(part, target):
    """Return (figures by family, cubins by name) of the Triton kernels; a family's name alone is its main kernel's."""
    report, cubins = {}, {}
    for name in (name for name in families.FAMILIES if part in name):
        kernels = family(name, target)
        report[name] = [each for each, _ in kernels]
        for index, (each, cubin) in enumerate(kernels):
            cubins[f"{name}-{target}" + (f"-{each['kernel']}" if index else "")] = cubin
    return report, cubins


def summaries(report):
    """Return the recorded kind of figures by family."""
    streams = {**{name: family.streams for name, family in families.FAMILIES.items()}, **cuda.STREAMS}
    return {name: figures.summary(kernels, streams[name]) for name, kernels in report.items()}


def write(folder, target, report, cubins):
    """Write the cubins, and the figures as JSON and as a table."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in cubins.items():
        (folder / f"{name}.cubin").write_bytes(data)
    (folder / f"report-{target}.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / f"report-{target}.md").write_text(table(report))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", default="", help="a part of a family's name; all by default")
    parser.add_argument("--target", default="sm_90", choices=TARGETS)
    parser.add_argument("--out", type=Path, help="a folder for the cubins and the report")
    parser.add_argument("--cuda", action="store_true", help="the CUDA C++ kernels instead, if NVRTC is there")
    parser.add_argument("--check", action="store_true", help="fail if a figure is larger than the recorded one")
    parser.add_argument("--record", action="store_true", help="record figures that fell")
    parser.add_argument("--grow", action="store_true", help="record figures that rose, too")
    args = parser.parse_args()
    compiler = "cuda" if args.cuda else VERSION
    report, cubins = (of_cuda if args.cuda else of_triton)(args.kernel, args.target)
    if args.out:
        write(args.out / ("cuda" if args.cuda else f"triton-{triton.__version__}"), args.target, report, cubins)
    elif not (args.check or args.record):
        for name, kernels in report.items():
            print(f"## {name} {args.target} {compiler}")
            show(kernels)
    found = summaries(report)
    if args.record:
        figures.record(found, compiler, args.target, args.grow)
    faults = figures.grown(found, figures.recorded(compiler, args.target)) if args.check else []
    print("\n".join(faults), end="\n" if faults else "")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
