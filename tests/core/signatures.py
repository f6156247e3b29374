"""What users call, a line each: ``python -m tests.core.signatures`` records it anew in ``signatures*.txt``.

A line that goes or changes is a change of the public API: a name that goes keeps an alias, which warns for a release.
"""

import importlib
import inspect
from pathlib import Path

HERE = Path(__file__).parent
PACKAGES = (
    "crate_kernels",
    "crate_kernels.analysis",
    "crate_kernels.distributed",
    "crate_kernels.models",
    "crate_kernels.models.aot",
    "crate_kernels.models.redunet",
    "crate_kernels.nn",
    "crate_kernels.testing",
)
# What needs nothing but PyTorch, and what needs more.
RECORDS = {"signatures.txt": PACKAGES, "signatures_transformers.txt": ("crate_kernels.integrations.transformers",)}


def lines(packages):
    """Return every public callable of packages with its arguments and their defaults, in order of names."""
    found = set()
    for package in packages:
        module = importlib.import_module(package)
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.isclass(thing):
                found.update(_of_class(f"{package}.{name}", thing))
            elif callable(thing):
                found.add(f"{package}.{name}{_signature(thing)}")
    return sorted(found)


def _of_class(path, kind):
    """Yield a class, and what it and the classes of ours that it comes from let users call and read."""
    yield f"{path}{_signature(kind)}"
    for owner in kind.__mro__:
        for name, member in vars(owner).items() if owner.__module__.startswith("crate_kernels") else ():
            if name.startswith("_"):
                continue
            if isinstance(member, property):
                yield f"{owner.__name__}.{name}"
            elif isinstance(member, staticmethod | classmethod) or inspect.isfunction(member):
                yield f"{owner.__name__}.{name}{_signature(getattr(owner, name))}"


def _signature(thing):
    """Return arguments and defaults without annotations, whose text depends on Python."""
    try:
        takes = inspect.signature(thing)
    except ValueError:  # as of built-in classes
        return "(...)"
    bare = [one.replace(annotation=one.empty) for one in takes.parameters.values()]
    if "transformers_version" in takes.parameters:  # what its version decides comes before ours, which go by name alone
        bare = [one for one in bare if one.kind is one.KEYWORD_ONLY]
    return str(takes.replace(parameters=bare, return_annotation=takes.empty))


if __name__ == "__main__":
    from tests.integrations import vision_schemas  # noqa: F401  transformers may import torchvision

    for record, packages in RECORDS.items():
        (HERE / record).write_text("".join(f"{line}\n" for line in lines(packages)))
