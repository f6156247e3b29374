"""What the machine code of the main kernels says without a GPU; figures.json has it, and its figures may only fall.

``python -m tests.tools.aot.report --kernel mssa_forward-d64-n16384 --target sm_90`` prints it, ``--out FOLDER`` writes
the cubins, ``--check`` compares it with the record, and ``--record`` writes what fell, with ``--grow`` what rose too.
``--spills PART`` writes what the cases with this part in their names spill into spills.json instead, likewise.
"""

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path

import triton

from tests.tools.aot import families, harness, listing

RECORDED = Path(__file__).with_name("figures.json")
VERSION = ".".join(triton.__version__.split(".")[:2])
TARGETS = ("sm_80", "sm_90", "sm_100")


def step(launch):
    """Name a launch: its function, and the steps of it that its constants switch on."""
    constants = {}
    for name, value in launch.arguments.items():
        constants |= value._asdict() if hasattr(value, "_asdict") else {name: value}
    switched = [k.lower() for k, v in constants.items() if v is True and k.isupper()]
    return "-".join([launch.function.__name__.strip("_").removesuffix("_kernel"), *switched])


def examine(launch, target):
    """Return (figures of a launch, its cubin)."""
    assembled = harness.assemble(launch, target)
    registers, stack = harness.nvidia_resources(assembled.compiled)
    function = harness.listed(launch, target)
    return {
        "kernel": step(launch),
        "instructions": len(function.instructions),
        "registers": registers,
        "spills": stack,
        "serialised": listing.serialised(function),
        # The assembler's warnings about warp-group products, by their numbers.
        "warnings": sorted(set(re.findall(r"C75\d\d", assembled.report))),
    }, assembled.compiled.asm["cubin"]


def family(name, target):
    """Return the figures and cubins of a family's kernels."""
    return [examine(launch, target) for launch in families.launches(name, target, harness.launches)]


def summary(kernels):
    """Return the recorded figures of a family from those of its kernels."""
    return {
        **{key: sum(one[key] for one in kernels) for key in ("instructions", "spills", "serialised")},
        "registers": max(one["registers"] for one in kernels),
        "warnings": sum(len(one["warnings"]) for one in kernels),
    }


def read():
    """Return the record, by version of Triton, target and family."""
    return json.loads(RECORDED.read_text()) if RECORDED.exists() else {}


def grown(found, target):
    """List which figures are larger than the recorded ones."""
    known = read().get(VERSION, {}).get(target, {})
    return [
        f"{name}: {key} is {figure}, recorded {known[name][key]}" if name in known else f"{name}: no record"
        for name, figures in found.items()
        for key, figure in figures.items()
        if name not in known or figure > known[name][key]
    ]


def record(found, target, grow):
    """Write the figures, the larger ones only if ``grow``."""
    every = read()
    known = every.setdefault(VERSION, {}).setdefault(target, {})
    for name, figures in found.items():
        before = known.get(name, figures)
        known[name] = {key: figure if grow else min(figure, before[key]) for key, figure in figures.items()}
    # A line per family, so that a change shows as one.
    text = json.dumps(every, indent=1, sort_keys=True)
    RECORDED.write_text(re.sub(r"\{\s+(\"instr[^}]*?)\s+\}", lambda m: f"{{{' '.join(m[1].split())}}}", text) + "\n")


def spilling_cases():
    """Yield (name, target, call, strict) for every case whose spills are recorded with this version of Triton."""
    from tests.ops.ista import exhaustive_aot as ista
    from tests.ops.mssa import aot, exhaustive_aot, test_aot
    from tests.ops.tssa import exhaustive_aot as tssa

    mssa = {
        **{n: (make(*args, causal=causal), *args[1:]) for n, (make, *args, causal) in exhaustive_aot.CALLS.items()},
        **{n: (aot.decode(*args), *args[1:]) for n, args in exhaustive_aot.STEPS.items()},
    }
    known = dict(test_aot.COVERING)
    known |= {n: (call, harness.TARGETS, exhaustive_aot.strict(*kind)) for n, (call, *kind) in mssa.items()}
    known |= {n: (call, harness.TARGETS, strict) for n, (call, strict) in tssa.CALLS.items()}
    known |= {n: (call, harness.TARGETS, True) for n, call in ista.CALLS.items()}
    for name, (call, targets, strict) in known.items():
        for target in targets:
            if not (strict and target in harness.STRICT and harness.VERSION in harness.TUNED):
                yield name, target, call, strict


def record_spills(part, grow):
    """Write the spills, the larger ones only if ``grow``; return those that are not written."""
    recorded, refused = json.loads(harness.RECORDED.read_text()), []
    for name, target, call, strict in spilling_cases():
        if part not in name:
            continue
        stacks = Counter()  # the largest per kernel, which may be compiled more than once, as for its steps
        for kernel in harness.compiled(call, target):
            key = harness.spill_key(name, target, kernel, strict)
            stacks[key] = max(stacks[key], kernel.stack)
        for key, stack in stacks.items():
            if not grow and stack > recorded.get(key, stack):
                refused.append(f"{key}: {recorded[key]} recorded, {stack} now")
                continue
            recorded.pop(key, None)
            if stack:
                recorded[key] = stack
                print(key, stack, flush=True)
            harness.RECORDED.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
    return refused


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", default="", help="a part of a family's name; all by default")
    parser.add_argument("--target", default="sm_90", choices=TARGETS)
    parser.add_argument("--out", type=Path, help="a folder for the cubins")
    parser.add_argument("--check", action="store_true", help="fail if a figure is larger than the recorded one")
    parser.add_argument("--record", action="store_true", help="record figures that fell")
    parser.add_argument("--grow", action="store_true", help="record figures that rose, too")
    parser.add_argument("--spills", metavar="PART", help="record the spills of cases with this in their names instead")
    args = parser.parse_args()
    if args.spills is not None:
        faults = record_spills(args.spills, args.grow)
        print("\n".join(faults))
        return 1 if faults else 0
    found = {}
    for name in (name for name in families.FAMILIES if args.kernel in name):
        kernels = family(name, args.target)
        found[name] = summary([figures for figures, _ in kernels])
        for figures, cubin in kernels:
            if not args.check:
                print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in figures.items()), flush=True)
            if args.out:
                args.out.mkdir(parents=True, exist_ok=True)
                (args.out / f"{name}-{args.target}-triton{VERSION}-{figures['kernel']}.cubin").write_bytes(cubin)
    if args.record:
        record(found, args.target, args.grow)
    faults = grown(found, args.target) if args.check else []
    print("\n".join(faults), end="\n" if faults else "")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
