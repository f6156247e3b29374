"""Every launch of Triton that interpreted tests make, compiled by Triton as far as its Python code goes.

The interpreter runs kernels that the compiler refuses, as those that read a pointer where a launch passes None.

    TRITON_INTERPRET=1 python -m pytest -p tests.tools.aot.launched --launched DIR tests/ops -k triton
    python -m tests.tools.aot.launched DIR

The first records launches into DIR, the second compiles each that differs in its source, for sm_90: 0.2 s a launch.
"""

import argparse
import importlib
import inspect
import os
import pickle
import sys
from pathlib import Path

import torch

from crate_kernels._triton import launch

TARGET = "sm_90"


def pytest_addoption(parser):
    parser.addoption("--launched", metavar="DIR", type=Path, required=True, help="record launches into this folder")


def pytest_configure(config):
    """Record launches by what Triton compiles them for; a process writes what it saw when its tests are over."""
    seen = {}

    def recorded(kernel, programs, arguments, run=launch._launch):
        function = kernel.fn
        if function.__module__.startswith("crate_kernels"):
            kinds = inspect.get_annotations(function)
            fixed = {name for name in arguments if "constexpr" in str(kinds.get(name)) or name not in kernel.arg_names}
            bare = {name: value if name in fixed else _bare(value) for name, value in arguments.items()}
            seen.setdefault(pickle.dumps((function.__module__, function.__name__, bare, fixed & set(bare))))
        return run(kernel, programs, arguments)

    launch._launch = recorded
    config.add_cleanup(lambda: _write(config.getoption("launched"), list(seen)))


def _write(folder, found):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{os.getpid()}.pickle").write_bytes(pickle.dumps(found))


def _each(change, value):
    """Change a number or tensor, or each of a tuple of them."""
    if not isinstance(value, tuple):
        return change(value)
    parts = [_each(change, part) for part in value]
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


def _bare(value):
    """Return an argument as the compiler sees it: the dtype of a tensor, an integer of the same kind."""

    def kind(value):
        if isinstance(value, torch.Tensor):
            return value.dtype
        if type(value) is int and abs(value) < 2**31:
            return value if value in (0, 1) else 16 if value % 16 == 0 else 3
        return 0.5 if isinstance(value, float) else value

    return _each(kind, value)


def _launches(folder):
    """Yield recorded launches, their tensors without memory."""
    from tests.tools.aot.harness import Launch

    def again(value):
        return torch.empty(0, dtype=value, device="meta") if isinstance(value, torch.dtype) else value

    recorded = {each for path in folder.glob("*.pickle") for each in pickle.loads(path.read_bytes())}
    for module, name, bare, fixed in map(pickle.loads, sorted(recorded)):
        function = getattr(importlib.import_module(module), name)
        arguments = {k: v if k in fixed else _each(again, v) for k, v in bare.items()}
        options = {k: arguments.pop(k) for k in list(arguments) if k not in function.arg_names}
        yield Launch(function, arguments, options)


def _refused(launches):
    """Return (launches that differ in their source, {(kernel, what the compiler says): arguments of the first})."""
    from triton._C.libtriton import ir
    from triton.compiler import make_backend

    from tests.tools.aot import harness

    target = harness.TARGETS[TARGET]
    backend = make_backend(target)
    known, refused = set(), {}
    for each in launches:
        source = harness.source_of(each, target)
        if source.hash() in known:
            continue
        known.add(source.hash())
        options, context = backend.parse_options(dict(each.options)), ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        codegen = backend.get_codegen_implementation(options)
        try:
            source.make_ir(target, options, codegen, backend.get_module_map(), context)
        except Exception as error:
            while error.__cause__ is not None:
                error = error.__cause__
            refused.setdefault((each.function.__name__, str(error)), each.arguments)
    return len(known), refused


def main():
    """Compile what was recorded; the exit status is 1 where the compiler refuses some of it, or nothing was there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="DIR", type=Path)
    count, refused = _refused(_launches(parser.parse_args().folder))
    for (name, said), arguments in refused.items():
        print(f"{name}: {said}\n  {arguments}")
    print(f"{count} kernels compiled, {len(refused)} kinds refused")
    return int(bool(refused) or not count)


if __name__ == "__main__":
    sys.exit(main())
