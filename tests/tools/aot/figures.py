"""The recorded figures of the main kernels, per compiler and architecture; those that are held may only fall.

``python -m tests.tools.aot.report --record`` writes those that fell, and with ``--grow`` those that rose too.
"""

import json
import re
from pathlib import Path

RECORDED = Path(__file__).with_name("figures.json")
HELD = ("ratio", "registers", "spills", "serialised", "warnings")
_CLOCKS = ("issue", "tensor", "mufu", "alu", "fp32", "shared")


def summary(kernels, streams):
    """Return the figures of a family; ``kernels`` are its reports, the main kernel first.

    "ratio" is issue clocks over the clocks of products or special functions, of the main loop. Where the memory's
    bandwidth is the limit (``streams``), it is the largest pipe's clocks over the memory's; the kernel of the largest
    such ratio is the main one.
    """
    if streams:
        kernels = sorted(kernels, key=lambda each: each["main"]["pressure"] or 0, reverse=True)
    first, main = kernels[0], kernels[0]["main"]
    return {
        "ratio": main["pressure"] if streams else main["ratio"],
        "registers": first["registers"],
        "spills": sum(each["stack"] for each in kernels),
        "serialised": sum(loop["serialised"] for each in kernels for loop in each["loops"]),
        "warnings": sum(len(each["warnings"]) for each in kernels),
        "streams": streams,
        "kernel": first["kernel"],
        "blocks": first["blocks"],
        "in_flight": main["in_flight"],
        "memory": main["memory"],
        "waits": main["waits"],
        **{pipe: main["clocks"].get(pipe, 0) for pipe in _CLOCKS},
    }


def read():
    return json.loads(RECORDED.read_text()) if RECORDED.exists() else {}


def recorded(compiler, target):
    """Return the recorded figures of a compiler by family; compilers are versions of Triton, and "cuda"."""
    return read().get(compiler, {}).get(target, {})


def grown(found, known):
    """List which held figures are larger in ``found`` than in ``known``; both are by family."""
    return [
        f"{name}: {key} is {figures[key]}, recorded {known[name][key]}" if name in known else f"{name}: no record"
        for name, figures in found.items()
        for key in HELD
        if name not in known or figures[key] > known[name][key]
    ]


def record(found, compiler, target, grow):
    """Write ``found``, of the held figures the larger ones only if ``grow``; "first" stays as it was first recorded."""
    every = read()
    known = every.setdefault(compiler, {}).setdefault(target, {})
    for name, figures in found.items():
        before = known.get(name, figures)
        held = {key: figures[key] if grow else min(figures[key], before[key]) for key in HELD}
        known[name] = {**figures, **held, "first": before.get("first", figures["ratio"])}
    # A line per family, so that a change shows as one.
    text = json.dumps(every, indent=1, sort_keys=True)
    RECORDED.write_text(re.sub(r"\{\n\s+(\"alu\"[^}]*?)\n\s+\}", lambda m: _line(m[1]), text) + "\n")


def _line(body):
    return "{" + re.sub(r"\n\s+", " ", body) + "}"
