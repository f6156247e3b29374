"""Write what spills into spills.json: ``python -m tests.tools.aot.record [part of a case's name]``.

For a new case, or after spills have shrunk; a larger number than the recorded one is a regression, which this tool
writes only with ``--grow``.
"""

import argparse
import json
import sys
from collections import Counter

from tests.ops.ista import exhaustive_aot as exhaustive_ista
from tests.ops.mssa import aot as mssa
from tests.ops.mssa import exhaustive_aot as exhaustive
from tests.ops.mssa import test_aot as test_mssa
from tests.ops.tssa import exhaustive_aot as exhaustive_tssa
from tests.tools.aot import harness


def cases():
    """Yield (name, target, call, strict) for every case whose spills are recorded with this version of Triton."""
    known = dict(test_mssa.COVERING)
    calls = {
        **{n: (make(*args, causal=causal), *args[1:]) for n, (make, *args, causal) in exhaustive.CALLS.items()},
        **{n: (mssa.decode(*args), *args[1:]) for n, args in exhaustive.STEPS.items()},
    }
    known |= {n: (call, harness.TARGETS, exhaustive.strict(*kind)) for n, (call, *kind) in calls.items()}
    known |= {n: (call, harness.TARGETS, strict) for n, (call, strict) in exhaustive_tssa.CALLS.items()}
    known |= {n: (call, harness.TARGETS, True) for n, call in exhaustive_ista.CALLS.items()}
    for name, (call, targets, strict) in known.items():
        for target in targets:
            if not (strict and target in harness.STRICT and harness.VERSION in harness.TUNED):
                yield name, target, call, strict


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="?", default="")
    parser.add_argument("--grow", action="store_true", help="write larger numbers too")
    args = parser.parse_args()
    recorded, refused = json.loads(harness.RECORDED.read_text()), []
    for name, target, call, strict in cases():
        if args.part not in name:
            continue
        stacks = Counter()  # the largest per kernel, which may be compiled more than once, as for its steps
        for kernel in harness.compiled(call, target):
            key = harness.spill_key(name, target, kernel, strict)
            stacks[key] = max(stacks[key], kernel.stack)
        for key, stack in stacks.items():
            if not args.grow and stack > recorded.get(key, stack):
                refused.append(f"{key}: {recorded[key]} recorded, {stack} now")
                continue
            recorded.pop(key, None)
            if stack:
                recorded[key] = stack
                print(key, stack, flush=True)
            harness.RECORDED.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
    print("\n".join(refused))
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
