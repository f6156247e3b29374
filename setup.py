"""Builds the C++ extension if PyTorch and a compiler are available.

pyproject.toml has everything else. Without PyTorch or a working compiler the install is pure Python, and complete.
Under build isolation there is no PyTorch by design. To compile, install what pyproject.toml's [build-system] requires,
then with `pip install --no-build-isolation`; or run `python -m crate_kernels build` afterwards. With `-v` pip shows why
the extension is left out. CUDA C++ is not compiled here: its sources are in the package, and NVRTC compiles them where
there is a GPU.
"""

import shutil
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
# Import the builder as its own package: importing crate_kernels imports PyTorch, which an isolated build lacks.
sys.modules["_native"] = ModuleType("_native")
sys.modules["_native"].__path__ = [str(ROOT / "crate_kernels" / "_native")]
build = import_module("_native.build")
EXTENSION = "crate_kernels._cpu"


class OptionalBuild(build_ext):
    """Compile with the package's own builder; a failure leaves the extension out."""

    def get_ext_filename(self, fullname):
        """Return the file name without a Python version: one file serves every Python."""
        return str(Path(*fullname.split("."))) + ".so"

    def build_extensions(self):
        """Compile, or print why not."""
        (ext,) = self.extensions
        target = Path(self.get_ext_fullpath(ext.name)).absolute()
        target.unlink(missing_ok=True)  # a build folder may hold an older library
        try:
            build.compile_extension(ROOT / "csrc", target, Path(self.build_temp).absolute())
        # Catch everything: a compiler can be missing, too old or broken, and torch has its own exceptions for it.
        except Exception as error:
            print(f"crate_kernels: pure-Python install, the C++ extension is left out: {error}")
            self.extensions.clear()


class HonestWheel(bdist_wheel):
    """Tag the wheel by its content: for any Python, and for any machine if nothing was compiled."""

    def run(self):
        """Compile first: the wheel is tagged for one kind of machine only if something compiled."""
        self.run_command("build")
        self.root_is_pure = not self.distribution.has_ext_modules()
        super().run()

    def get_tag(self):
        """Return a tag for any Python: a compiled library depends on PyTorch's stable ABI, not on Python's."""
        return "py3", "none", super().get_tag()[2]


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
    ext_modules=[Extension(EXTENSION, [])],
    cmdclass={"bdist_wheel": HonestWheel, "build_ext": OptionalBuild, "build_py": WithSources},
)
