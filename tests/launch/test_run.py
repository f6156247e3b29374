"""Launches of compiled kernels: Triton is asked for one once, and later launches take it by our own key."""

from typing import Any, NamedTuple

import pytest
import torch

from crate_kernels._triton import launch


class Strided(NamedTuple):
    ptr: Any
    stride: int


class Kernel:
    """A pretended kernel: notes each launch, by Triton or of what Triton compiled."""

    do_not_specialize = ("rows",)
    arg_names = ("x", "out", "rows", "scale", "BLOCK")

    def __init__(self):
        self.asked, self.launched = [], []
        self.fn = lambda: None

    def __getitem__(self, grid):
        def ask(**arguments):
            self.asked.append(arguments)
            return Compiled(self)

        return ask


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *values: self.kernel.launched.append((grid, values))


def arguments(**changed):
    x, out = torch.zeros(16), torch.zeros(16)
    return {"BLOCK": 64, "x": Strided(x, 4), "out": out, "rows": 10, "scale": 1.0, "num_warps": 4} | changed


def test_a_second_launch_takes_what_the_first_compiled():
    kernel, first, second = Kernel(), arguments(), arguments(rows=33, scale=2.0 - 1.0)
    launch.run(kernel, 7, **first)
    launch.run(kernel, 9, **second)
    assert kernel.asked == [{**first, "enable_fp_fusion": True}]
    ((grid, values),) = kernel.launched
    assert grid == (9, 1, 1)
    assert [id(v) for v in values] == [id(second[name]) for name in Kernel.arg_names]


OTHERS = {
    "constant": lambda: arguments(BLOCK=32),
    "option": lambda: arguments(num_warps=8),
    "stride": lambda: arguments(x=Strided(torch.zeros(16), 1)),
    "dtype": lambda: arguments(x=Strided(torch.zeros(16, dtype=torch.half), 4)),
    "no-tensor": lambda: arguments(out=None),
    "integer-for-float": lambda: arguments(scale=1),
    "wide-size": lambda: arguments(rows=2**31),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_another_kind_of_launch_asks_triton(other):
    kernel = Kernel()
    launch.run(kernel, 1, **arguments())
    launch.run(kernel, 1, **other())
    assert (len(kernel.asked), len(kernel.launched)) == (2, 0)


def test_another_device_asks_triton(monkeypatch):
    kernel = Kernel()
    for device in (0, 1):
        monkeypatch.setattr(torch.Tensor, "get_device", lambda self, device=device: device)
        launch.run(kernel, 1, **arguments())
    assert (len(kernel.asked), len(kernel.launched)) == (2, 0)


@pytest.mark.parametrize("recorded", [False, True], ids=["plain", "in-a-record"])
@pytest.mark.parametrize("offset", [1, 2, 4, 8, 12, 16, 24, 32])
def test_addresses_that_are_no_multiple_of_16_always_ask_triton(offset, recorded):
    tensor = torch.zeros(64, dtype=torch.int8)[offset:]
    kernel, options = Kernel(), {"x": Strided(tensor, 4)} if recorded else {"out": tensor}
    for _ in range(2):
        launch.run(kernel, 1, **arguments(**options))
    assert len(kernel.asked) == (2 if offset % 16 else 1)
    assert len(kernel.asked) + len(kernel.launched) == 2


def test_a_parameter_is_not_kept():
    kernel, weight = Kernel(), torch.nn.Parameter(torch.zeros(16))
    for _ in range(2):
        launch.run(kernel, 1, **arguments(out=weight))
    assert (len(kernel.asked), len(kernel.launched)) == (1, 1)
    (key,) = (key for key in launch._compiled if key[0] is kernel.fn)
    assert not any(isinstance(part, torch.Tensor) for part in key)


def test_no_more_kernels_are_kept_than_a_limit(monkeypatch):
    monkeypatch.setattr(launch, "_MAX_COMPILED", 3)
    monkeypatch.setattr(launch, "_compiled", {})
    kernel = Kernel()
    for block in range(5):
        launch.run(kernel, 1, **arguments(BLOCK=block))
    assert len(launch._compiled) == 2


def test_an_argument_left_to_its_default_always_asks_triton():
    kernel, options = Kernel(), arguments()
    del options["scale"]
    for _ in range(2):
        launch.run(kernel, 1, **options)
    assert (len(kernel.asked), len(kernel.launched)) == (2, 0)
