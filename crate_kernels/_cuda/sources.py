"""Sources of kernels: a header of csrc, a kernel in it, and all that the header includes, as texts for NVRTC."""

from __future__ import annotations

import ctypes
import posixpath
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from crate_kernels._cuda.records import Record
from crate_kernels._native import libraries
from crate_kernels._native.libraries import BuildError

_INCLUDE = re.compile(r'^#include "([^"]+)"$', re.MULTILINE)

# As much of the standard headers as device code uses; NVRTC has none.
_STANDARD = {
    "cfloat": """#pragma once
#define FLT_MAX __int_as_float(0x7f7fffff)
""",
    "cmath": """#pragma once
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)
#define HUGE_VAL __longlong_as_double(0x7ff0000000000000LL)
""",
    "cstdint": """#pragma once
using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using intptr_t = long long;
using uintptr_t = unsigned long long;
""",
    "cstring": "#pragma once\n",  # memcpy is built in
    "type_traits": """#pragma once
namespace std {
template <class T, T v>
struct integral_constant {
  static constexpr T value = v;
  constexpr operator T() const { return v; }
};
template <class A, class B>
struct is_same : integral_constant<bool, false> {};
template <class A>
struct is_same<A, A> : integral_constant<bool, true> {};
template <class A, class B>
inline constexpr bool is_same_v = is_same<A, B>::value;
template <bool first, class A, class B>
struct conditional {
  using type = A;
};
template <class A, class B>
struct conditional<false, A, B> {
  using type = B;
};
template <bool first, class A, class B>
using conditional_t = typename conditional<first, A, B>::type;
template <class T>
struct remove_const {
  using type = T;
};
template <class T>
struct remove_const<const T> {
  using type = T;
};
template <class T>
using remove_const_t = typename remove_const<T>::type;
}  // namespace std
""",
}


class Kernel(NamedTuple):
    """A kernel of the device code.

    Attributes:
        header: below csrc, "ista/cuda/update.cuh".
        name: in C++ below the namespace crate_kernels, with template arguments, "ista_symmetrize_kernel<bf16>".
    """

    header: str
    name: str


def unit(kernel: Kernel, records: Iterable[type[Record]] = ()) -> str:
    """Return a source that has the kernel, and checks the records of its parameters against the device code."""
    checks = "".join(map(_check, sorted(set(_with_parts(records)), key=lambda record: record.cpp_name())))
    return f'#include <cmath>\n#include "{kernel.header}"\nusing namespace crate_kernels;\n{checks}'


def _with_parts(records: Iterable[type[Record]]) -> Iterable[type[Record]]:
    for record in records:
        yield record
        yield from _with_parts(record.parts())


def _check(record: type[Record]) -> str:
    """Return assertions that a struct is laid out as its record; without offsets for NVRTC, which has no offsetof.

    Layouts are those of the host's compiler.
    """
    name = record.cpp_name()
    offsets = "".join(
        _assert(f"__builtin_offsetof({name}, {field}) == {offset}", name) for field, offset in record.offsets().items()
    )
    return f"{_assert(f'sizeof({name}) == {ctypes.sizeof(record)}', name)}#ifndef __CUDACC_RTC__\n{offsets}#endif\n"


def _assert(fact: str, name: str) -> str:
    return f'static_assert({fact}, "{name} differs from its record in Python");\n'


@cache
def headers(name: str) -> dict[str, str]:
    """Return the texts of a header of csrc and of what it includes, by the names that they include each other by.

    Raises:
        BuildError: the sources are not installed.
    """
    folder = libraries.source_folder()
    if folder is None:
        raise BuildError("the CUDA sources are not installed; install from a source distribution or a checkout")
    found = dict(_STANDARD)
    _add(folder, name, found)
    return found


def _add(folder: Path, name: str, found: dict[str, str]) -> None:
    """Add a header, its includes named from csrc. What it includes from elsewhere is for other compilers."""
    if name in found or not (folder / name).is_file():
        return
    inside = posixpath.dirname(name)

    def rename(include: re.Match[str]) -> str:
        path = posixpath.join("/csrc", inside, include[1])  # a test's header is outside, and includes from csrc
        return f'#include "{posixpath.relpath(path, "/csrc")}"'

    found[name] = _INCLUDE.sub(rename, (folder / name).read_text(encoding="utf-8"))
    for included in _INCLUDE.findall(found[name]):
        if not included.startswith(".."):
            _add(folder, included, found)
