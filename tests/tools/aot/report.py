"""Bounds of the main kernels from their machine code, without a GPU: no number here is a measurement.

``python -m tests.tools.aot.report --kernel mssa_forward-d64-n16384 --target sm_90`` prints every loop of one kernel;
``--out FOLDER`` writes the cubins of all, report.json and report.md.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton

from tests.tools.aot import families, harness
from tests.tools.sass import kernel, listing

_PIPES = ("issue", "tensor", "mufu", "fp32", "alu", "imad", "half", "double", "shared", "shuffle", "memory")


def disassemble(cubin):
    """Return the functions of a cubin."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [harness.nvidia_tool("nvdisasm"), "-c", path]
        return listing.functions(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def step(launch):
    """Name a launch: its function, and the steps of it that its constants switch on."""
    switched = [k.lower() for k, v in launch.arguments.items() if v is True and k.isupper()]
    return "-".join([launch.function.__name__.strip("_").removesuffix("_kernel"), *switched])


def examine(launch, target):
    """Return (bounds of a launch, its cubin, the numbers of the assembler's warnings about warp-group products)."""
    assembled = harness.assemble(launch, target)
    compiled = assembled.compiled
    registers, stack = harness.nvidia_resources(compiled)
    build = kernel.Build(target, registers, compiled.metadata.shared, compiled.metadata.num_warps, stack)
    (function,) = [f for f in disassemble(compiled.asm["cubin"]) if f.name == launch.function.__name__]
    warnings = sorted(set(re.findall(r"C75\d\d", assembled.report)))
    return kernel.bounds(function, build, families.inner_trips(launch)), compiled.asm["cubin"], warnings


def row(bound):
    """Return a loop's figures as plain numbers."""
    costs = bound.costs
    return {
        "loop": bound.label,
        "depth": bound.depth,
        "instructions": round(costs.instructions),
        "clocks": {pipe: round(costs.clocks[pipe]) for pipe in _PIPES if costs.clocks[pipe]},
        "ratio": round(bound.ratio, 3) if bound.ratio is not None else None,
        "memory_share": round(bound.memory_share, 3),
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
    call, backward = families.FAMILIES[name]
    every = []
    for launch in families.kept(harness.launches(call, target), backward):
        found, cubin, warnings = examine(launch, target)
        every.append((record(step(launch), found, warnings), cubin))

    def weight(pair):
        clocks = pair[0]["main"]["clocks"]
        return clocks.get("tensor", 0), clocks["issue"]

    return sorted(every, key=weight, reverse=True)


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
            ratio = "" if main_loop["ratio"] is None else f"{main_loop['ratio']:.2f}"
            cells = [name, f"`{each['kernel']}`", each["registers"], each["blocks"], main_loop["instructions"], *clocks]
            cells += [ratio, f"{main_loop['memory_share']:.2f}", f"{main_loop['in_flight'] / 1024:.0f}"]
            cells += [main_loop["waits"], main_loop["serialised"], " ".join(each["warnings"])]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def show(kernels):
    """Print every loop of a family's kernels."""
    for each in kernels:
        print(", ".join(f"{k} {each[k]}" for k in ("kernel", "warps", "registers", "stack", "shared", "blocks")))
        print("  assembler:", " ".join(each["warnings"]) or "no warning of warp-group products")
        for loop in each["loops"] or [each["main"]]:
            main_mark = "*" if loop == each["main"] else " "
            print(f"{main_mark} {'  ' * loop['depth']}{loop['loop']}: {loop['instructions']} instructions,", end=" ")
            print(", ".join(f"{pipe} {n}" for pipe, n in loop["clocks"].items()))
            rest = ("ratio", "memory_share", "in_flight", "waits", "serialised", "barriers", "narrow", "guarded")
            print("    ", ", ".join(f"{k} {loop[k]}" for k in (*rest, "spills", "unknown") if loop[k]))
            print("    ", " ".join(f"{name}:{n}" for name, n in loop["mnemonics"].items()))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", default="", help="a part of a family's name; all by default")
    parser.add_argument("--target", default="sm_90", choices=["sm_80", "sm_90", "sm_100"])
    parser.add_argument("--out", type=Path, help="a folder for the cubins and the report")
    args = parser.parse_args()
    report = {}
    folder = args.out / f"triton-{triton.__version__}" if args.out else None
    for name in families.FAMILIES:
        if args.kernel not in name:
            continue
        kernels = family(name, args.target)
        report[name] = [figures for figures, _ in kernels]
        if folder is None:
            print(f"## {name} {args.target} Triton {triton.__version__}")
            show(report[name])
            continue
        folder.mkdir(parents=True, exist_ok=True)
        for index, (figures, cubin) in enumerate(kernels):
            rest = f"-{figures['kernel']}" if index else ""
            (folder / f"{name}-{args.target}{rest}.cubin").write_bytes(cubin)
        (folder / f"report-{args.target}.json").write_text(json.dumps(report, indent=1) + "\n")
        (folder / f"report-{args.target}.md").write_text(table(report))
    return 0 if report else 1


if __name__ == "__main__":
    sys.exit(main())
