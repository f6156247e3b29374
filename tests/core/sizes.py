"""Cases, launches and settings that no signature holds: ``python -m tests.core.sizes`` records them in ``sizes.txt``.

A line that changes there is a decision: results of before are of other cases, other launches or other settings.
"""

import argparse
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path

from crate_kernels import cli, models, testing
from crate_kernels.cli import tune
from crate_kernels.experiments import EXPERIMENTS
from crate_kernels.ops.ista.triton import tables

RECORDED = Path(__file__).with_suffix(".txt")
UNTIMED = tables.FORWARD_FORM, tables.BACKWARD_FORM, tables.LINEAR, tables.GATED
NAMED = {one.name: one for one in EXPERIMENTS}


def lines():
    """Return all lines, in the order of the code."""
    return [*_cases(), *_launches(), *_models(), *_options()]


def _cases():
    """Yield what tests compare and benchmarks time."""
    for op, spec in testing.SPECS.items():
        yield from (f"{op} compares {_fields(one)}" for one in spec.cases)
        yield from (f"{op} times {_timed(one)}" for one in spec.timed)
        if spec.sweep is not None:
            title, brief = spec.sweep.title, spec.sweep.brief
            yield from (f"{op} varies {title} {brief}: {_timed(each)}" for each in (spec.sweep.base, spec.sweep.image))
        if spec.decoding is not None:
            yield from (f"{op} decodes {_fields(one)}" for one in spec.decoding.steps)


def _launches():
    """Yield what tuning times, the rows of every launch table by what they ask of a call, and its candidates."""
    workloads = tune.workloads(("mssa", "tssa", "ista"), packages=("triton",))  # those of CUDA C++ are the GPU's
    yield from (f"tune {one}" for one in workloads)
    for table in {one.name: one for one in (*(work.table for work in workloads), *UNTIMED)}.values():
        for arch, rows in table.rows.items():
            for row in rows:
                asked = [f"{key}={value}" for key, value in vars(row).items() if key != "config" and value is not None]
                yield " ".join([table.name, arch, *asked, "takes", *(f"{key}={row.config[key]}" for key in row.config)])
        keys = list(dict.fromkeys(key for one in table.candidates for key in one))
        tried = ["/".join(str(one.get(key, "-")) for key in keys) for one in table.candidates]
        yield " ".join([table.name, "tries", "/".join(keys), *tried])


def _models():
    """Yield the fields of every published size."""
    yield from (f"{name} {_fields(models._OWNERS[name].SIZES[name])}" for name in models.names())


def _options():
    """Yield the options of every command with their defaults, and the presets of every experiment."""
    for name, command in {
        **{name: import_module(f"crate_kernels.cli.{name}") for name in cli._COMMANDS},
        **NAMED,
    }.items():
        command.add_arguments(parser := argparse.ArgumentParser(add_help=False))
        for one in parser._actions:
            taken = "/".join(one.option_strings) or one.dest
            yield f"{name} {taken} {one.nargs} {one.default} {list(one.choices or ())}"
    for name, experiment in NAMED.items():
        yield from (f"{name} {preset} {_fields(config)}" for preset, config in experiment.presets().items())


def _fields(one):
    """Return what a case or a config says, without the names of classes."""
    fields = {name: _fields(value) if is_dataclass(value) else value for name, value in vars(one).items()}
    return " ".join(f"{name}={value}" for name, value in fields.items() if value not in ("", (), {}, None))


def _timed(one):
    return f"{_fields(one.case)}: {_fields(one)}"


if __name__ == "__main__":
    RECORDED.write_text("".join(f"{line}\n" for line in lines()))
