"""Records: where tensors lie in the bytes of a kernel's parameters, and that the device code's structs are the same."""

import ctypes
import struct
import subprocess

import pytest
import torch

from crate_kernels._cuda import records, sources
from crate_kernels._cuda.records import POINTER, Record
from crate_kernels._cuda.sources import Kernel
from crate_kernels.ops.mssa.cuda import problem
from tests.tools.emulator import emulated


class Pair(Record):
    _fields_ = (("count", ctypes.c_int), ("data", POINTER))


class Base(Record):
    _fields_ = (("pair", Pair), ("scale", ctypes.c_float))


class Derived(Base):
    cpp = "inner::Derived"
    _fields_ = (("other", POINTER), ("sizes", ctypes.c_int64 * 3), ("flag", ctypes.c_bool))


def test_tensors_are_at_the_bytes_of_their_addresses():
    a, b = torch.zeros(4), torch.zeros(4)
    record = Derived(pair=Pair(count=7, data=a), scale=0.5, other=b[1:], sizes=(1, 2, 3), flag=True)
    (found,) = records.packed([record])
    assert {at: t.data_ptr() for at, t in found.tensors.items()} == {8: a.data_ptr(), 24: b.data_ptr() + 4}
    assert found.content == struct.pack("<ixxxxQfxxxxQqqq?7x", 7, a.data_ptr(), 0.5, b.data_ptr() + 4, 1, 2, 3, True)


def test_what_is_not_set_is_zero_and_what_is_replaced_is_gone():
    record = Pair(data=torch.zeros(4))
    record.data = None
    (found,) = records.packed([record])
    assert (found.content, found.tensors) == (bytes(16), {})


def test_fields_of_parts_are_set_by_their_own_names():
    w, lse, seed = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3), torch.zeros(1, dtype=torch.int64)
    (found,) = records.packed([problem.MssaProblem(w=problem.rows_of(w, False), lse=lse, seed=seed, scale=0.5)])
    of, inputs, outputs = problem.MssaProblem, problem.MssaInputs, problem.MssaOutputs
    assert {at: t.data_ptr() for at, t in found.tensors.items()} == {
        of.inputs.offset + inputs.w.offset: w.data_ptr(),
        of.outputs.offset + outputs.lse.offset: lse.data_ptr(),
        of.masking.offset + problem.MssaMasking.seed.offset: seed.data_ptr(),
    }
    made = of.from_buffer_copy(found.content)
    assert (made.inputs.w.row, made.inputs.w.wide, made.scale) == (4, True, 0.5)
    names = [name for record in (of, *problem.PARTS.values()) for name in record.offsets()]
    assert len(names) == len(set(names))


def test_tensors_nulls_and_numbers_are_parameters_too():
    a = torch.zeros(4)
    found = records.packed([a, None, ctypes.c_int64(-1), ctypes.c_float(2)])
    assert [f.content for f in found] == [struct.pack("<Q", a.data_ptr()), bytes(8), b"\xff" * 8, struct.pack("<f", 2)]
    assert [list(f.tensors) for f in found] == [[0], [], [], []]


def test_an_unknown_field_and_an_untyped_number_are_refused():
    with pytest.raises(AttributeError, match=r"^Pair has no field datum; it has count, data$"):
        Pair(datum=1)
    with pytest.raises(TypeError, match=r"parameter 1 must be a record, a tensor, None or of ctypes, got 5"):
        records.packed([None, 5])


STRUCTS = """#pragma once
namespace crate_kernels {
struct Pair { int count; void* data; };
struct Base { Pair pair; float scale; };
namespace inner { struct Derived : Base { const char* other; long long sizes[3]; bool flag; }; }
}
"""
DIFFERENT = {
    "same": (STRUCTS, None),
    "order": (STRUCTS.replace("int count; void* data", "void* data; int count"), "Pair differs from its record"),
    "size": (STRUCTS.replace("sizes[3]", "sizes[4]"), "inner::Derived differs from its record"),
    "name": (STRUCTS.replace("flag", "flags"), "flag"),
}


@pytest.mark.parametrize(("structs", "message"), DIFFERENT.values(), ids=DIFFERENT)
def test_a_struct_that_differs_is_an_error_of_the_compiler(structs, message, tmp_path):
    reason = emulated.unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    (tmp_path / "a.cuh").write_text(structs)
    source = tmp_path / "unit.cpp"
    source.write_text(sources.unit(Kernel("a.cuh", "f"), [Derived]))
    command = ["g++", "-std=c++17", "-fsyntax-only", "-Wno-invalid-offsetof", f"-I{tmp_path}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode == 0) == (message is None), done.stderr
    assert (message or "") in done.stderr
