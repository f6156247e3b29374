"""Check that a binary wheel holds one library, the C++ extension, and try it where there is no compiler.

``make wheel`` runs this on the wheel that auditwheel tagged by the C and C++ libraries that it needs. auditwheel copies
any other library into it, but for PyTorch's, which is in memory before the extension is loaded.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
EXTENSION = "crate_kernels/_cpu.so"


def faults(wheel):
    """List the libraries that a wheel must not hold, or lacks."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".so" in Path(name).suffixes}
    wrong = [f"must hold no other library, got {name}" for name in sorted(names - {EXTENSION})]
    return wrong if EXTENSION in names else [*wrong, f"must hold {EXTENSION}"]


def try_out(wheel, folder):
    """Install a wheel with its dependencies where there is no compiler and an empty home; run it on its library."""
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
    parser.add_argument("--no-trial", action="store_true", help="only read what it holds")
    arguments = parser.parse_args()
    wrong = faults(arguments.wheel)
    for fault in wrong:
        print(f"{arguments.wheel.name}: {fault}")
    if wrong:
        return 1
    if not arguments.no_trial:
        with tempfile.TemporaryDirectory() as folder:
            try_out(arguments.wheel.absolute(), Path(folder))
    print(f"{arguments.wheel.name} holds one library{'' if arguments.no_trial else ', and works without a compiler'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
