"""Check what a binary wheel needs, and try it in a fresh environment without a compiler.

``make wheel`` runs this on the wheel that auditwheel tagged. What its one library, the C++ extension, needs is read
from it again here: the C library and the C++ library no newer than the tag says, PyTorch's for CPUs, and no others.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[3]
# The newest GLIBCXX version of the C++ library that systems with a C library have: of the tag's platform, or older.
NEWEST_CXX = {(2, 28): (3, 4, 24), (2, 31): (3, 4, 28), (2, 34): (3, 4, 29), (2, 35): (3, 4, 30), (2, 39): (3, 4, 33)}
SYSTEM = {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "libstdc++.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1"}
SYSTEM |= {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
EXTENSION = "crate_kernels/_cpu.so"
PYTORCH = "libtorch_cpu.so"  # in memory before the library is loaded; not to be copied


class Needs(NamedTuple):
    """What a library needs.

    Attributes:
        libraries: names of other libraries.
        versions: the newest of each versioned set of symbols: {"GLIBC": (2, 32)}.
        search: folders in which it looks for libraries.
    """

    libraries: set[str]
    versions: dict[str, tuple[int, ...]]
    search: list[str]


def needs(library):
    """Return what a library needs, as binutils reads it."""
    command = ["readelf", "--wide", "--dynamic", "--version-info", str(library)]
    return parsed(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def parsed(said):
    """Return what readelf says that a library needs."""
    versions = {}
    for name, version in re.findall(r"Name: ([A-Z]+)_([\d.]+)\b", said):
        versions[name] = max(versions.get(name, ()), tuple(int(part) for part in version.split(".")))
    libraries = set(re.findall(r"\(NEEDED\).*\[(.*)\]", said))
    search = re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", said)
    return Needs(libraries, versions, search)


def faults(found, tag):
    """List what a library needs beyond a platform tag, PyTorch and the system's own libraries."""
    wrong = [f"needs {name}" for name in sorted(found.libraries - SYSTEM - {PYTORCH})]
    # By name: a library that PyTorch has in memory serves only those that ask for it.
    wrong += [] if PYTORCH in found.libraries else [f"must need {PYTORCH}"]
    wrong += [f"looks for libraries in {folder}" for folder in found.search]
    match = re.match(r"manylinux_(\d+)_(\d+)_", tag)
    if match is None:
        return [*wrong, f"must have a manylinux tag, got {tag}"]
    libc = int(match[1]), int(match[2])
    cxx = max((newest for known, newest in NEWEST_CXX.items() if known <= libc), default=(3, 4, 19))
    for name, most in (("GLIBC", libc), ("GLIBCXX", cxx)):
        if found.versions.get(name, ()) > most:
            wrong.append(f"needs {name}_{_dotted(found.versions[name])}, later than {_dotted(most)} of {tag}")
    return wrong


def _dotted(version):
    return ".".join(map(str, version))


def check(wheel):
    """Return the faults of a wheel, and print what its library needs."""
    tag = wheel.stem.rpartition("-")[2].split(".")[0]
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        names = {name for name in archive.namelist() if ".so" in Path(name).suffixes}
        wrong = [f"must hold no other library, got {name}" for name in sorted(names - {EXTENSION})]
        if EXTENSION not in names:
            return [*wrong, f"must hold {EXTENSION}"]
        found = needs(archive.extract(EXTENSION, folder))
    listed = ", ".join(f"{key} {_dotted(version)}" for key, version in sorted(found.versions.items()))
    print(f"{EXTENSION}: {', '.join(sorted(found.libraries))}; {listed}")
    return wrong + [f"{EXTENSION} {fault}" for fault in faults(found, tag)]


def try_out(wheel, folder):
    """Install a wheel with its dependencies where there is no compiler and an empty home; run it on its own library."""
    python = folder / "venv" / "bin" / "python"
    run([sys.executable, "-m", "venv", str(folder / "venv")])
    constraints = ["-c", str(ROOT / "constraints.txt")]
    run([str(python), "-m", "pip", "install", "-q", "--only-binary", ":all:", *constraints, str(wheel)])
    (folder / "home").mkdir()
    bare = {"PATH": str(python.parent), "HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    where = (
        "from crate_kernels._native import extension as e; assert e.PATH.parent.parent.name == 'site-packages', e.PATH"
    )
    run([str(python), "-c", where], env=bare, cwd=folder)
    run([str(python), "-m", "crate_kernels", "info"], env=bare, cwd=folder)
    run([str(python), "-m", "crate_kernels", "verify", "--backend", "cpp"], env=bare, cwd=folder)
    assert not list((folder / "home").iterdir()), "nothing may be built"


def run(command, **options):
    """Run a command; stop if it fails."""
    print("+", " ".join(command), flush=True)
    subprocess.run(command, check=True, **options)


def main():
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.ship.wheel", description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--no-trial", action="store_true", help="only read what it needs")
    arguments = parser.parse_args()
    wrong = check(arguments.wheel)
    for fault in wrong:
        print(f"{arguments.wheel.name}: {fault}")
    if wrong:
        return 1
    if not arguments.no_trial:
        with tempfile.TemporaryDirectory() as folder:
            try_out(arguments.wheel.absolute(), Path(folder))
    print(
        f"{arguments.wheel.name} is what its tag says{'' if arguments.no_trial else ', and works without a compiler'}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
