"""Builds the C++ extension where PyTorch and a compiler are at hand; pyproject.toml has everything else.

Without C++ sources, PyTorch or a working compiler the install is pure Python and complete. Under build
isolation there is no PyTorch by design: to compile, install with `pip install --no-build-isolation`.
"""

from pathlib import Path

from setuptools import setup


def extension():
    sources = sorted(path.as_posix() for path in Path("csrc").rglob("*.cpp"))
    if not sources:
        return {}
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except (ImportError, OSError) as error:  # OSError: PyTorch is there, a library it loads is not
        print(f"crate_kernels: pure-Python install, the C++ extension is left out: {error}")
        return {}

    class OptionalBuild(BuildExtension):
        def run(self):
            try:
                super().run()
            # Everything: a compiler can be missing, too old or broken, and torch, ninja, setuptools and
            # subprocess each have their own exception for it.
            except Exception as error:
                print(f"crate_kernels: pure-Python install, the C++ extension failed to build: {error}")
                self.extensions = []

    return {
        "ext_modules": [CppExtension("crate_kernels._C", sources)],
        "cmdclass": {"build_ext": OptionalBuild},
    }


setup(**extension())
