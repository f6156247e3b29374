"""Builds the C++ extension where PyTorch and a compiler are at hand; pyproject.toml has everything else.

Without PyTorch or a working compiler the install is pure Python and complete. Under build isolation there is no
PyTorch by design: to compile, install with `pip install --no-build-isolation`, or afterwards run
`python -m crate_kernels build`.
"""

import runpy
import shutil
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
# By path: importing the package would import PyTorch, which an isolated build does not have.
BUILD = runpy.run_path(str(ROOT / "crate_kernels" / "_build.py"))


class OptionalBuild(build_ext):
    """Compile with the package's own builder; a failure leaves a pure-Python install."""

    def build_extension(self, ext):
        """Compile, or print why not."""
        target = Path(self.get_ext_fullpath(ext.name)).absolute()
        target.unlink(missing_ok=True)  # a build folder may hold an older one
        try:
            BUILD["compile_extension"](ROOT / "csrc", target)
        # Everything: a compiler can be missing, too old or broken, and torch has its own exceptions for it.
        except Exception as error:
            print(f"crate_kernels: pure-Python install, the C++ extension is left out: {error}")
            self.extensions.remove(ext)


class WithSources(build_py):
    """Ship the C++ sources, from which `python -m crate_kernels build` compiles later."""

    def run(self):
        """Copy the package, then the sources."""
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "crate_kernels" / "csrc"
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(ROOT / "csrc", target)


setup(
    ext_modules=[Extension("crate_kernels._C", [])],
    cmdclass={"build_ext": OptionalBuild, "build_py": WithSources},
)
