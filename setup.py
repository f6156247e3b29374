"""Builds the C++ extension and the CUDA library if PyTorch and a compiler are available.

pyproject.toml has everything else. Without PyTorch or a working compiler the install is pure Python, and complete.
Under build isolation there is no PyTorch by design. To compile, install what pyproject.toml's [build-system] requires,
then with `pip install --no-build-isolation`; or run `python -m crate_kernels build` afterwards. With `-v` pip shows why
something is left out. The CUDA library is left out if PyTorch has no CUDA or sees no GPU, except in a wheel that asks
for it: `bdist_wheel --cuda`, which `make wheel CUDA=1` passes on.
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
compilers = import_module("_native.compilers")
CPU, CUDA = "crate_kernels._cpu", "crate_kernels._cuda"


def compile_cuda(target, objects, anywhere):
    """Compile the CUDA library; ``anywhere`` also without a GPU, for every architecture."""
    import torch

    if not anywhere and torch.version.cuda is None:
        raise build.BuildError("this PyTorch has no CUDA")
    if not anywhere and not torch.cuda.is_available():
        raise build.BuildError("PyTorch sees no GPU; python -m crate_kernels build --cuda compiles it all the same")
    build.compile_cuda(ROOT / "csrc", target, compilers.CUDA_ARCHS if anywhere else compilers.cuda_archs(), objects)


class OptionalBuild(build_ext):
    """Compile with the package's own builder; a failure leaves out what failed."""

    def get_ext_filename(self, fullname):
        """Return the file name without a Python version: one file serves every Python."""
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext):
        """Compile, or print why not."""
        asked = ext.name == CUDA and getattr(self.distribution.get_command_obj("bdist_wheel"), "cuda", False)
        target = Path(self.get_ext_fullpath(ext.name)).absolute()
        target.unlink(missing_ok=True)  # a build folder may hold an older library
        objects = Path(self.build_temp).absolute()
        try:
            if ext.name == CUDA:
                compile_cuda(target, objects, asked)
            else:
                build.compile_extension(ROOT / "csrc", target, objects)
        # Catch everything: a compiler can be missing, too old or broken, and torch has its own exceptions for it.
        except Exception as error:
            if asked:
                raise
            what = "the CUDA library" if ext.name == CUDA else "pure-Python install, the C++ extension"
            print(f"crate_kernels: {what} is left out: {error}")
            self.extensions.remove(ext)

    def build_extensions(self):
        """Compile each extension. Iterate over a copy: an extension that fails is removed from the list."""
        for ext in list(self.extensions):
            self.build_extension(ext)


class HonestWheel(bdist_wheel):
    """Tag the wheel by its content: for any Python, and for any machine if nothing was compiled."""

    user_options = [*bdist_wheel.user_options, ("cuda", None, "compile the CUDA library too, or fail; needs no GPU")]  # noqa: RUF012
    boolean_options = [*bdist_wheel.boolean_options, "cuda"]  # noqa: RUF012

    def initialize_options(self):
        """Leave the CUDA library to the machine."""
        super().initialize_options()
        self.cuda = False

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
    ext_modules=[Extension(CPU, []), Extension(CUDA, [])],
    cmdclass={"bdist_wheel": HonestWheel, "build_ext": OptionalBuild, "build_py": WithSources},
)
