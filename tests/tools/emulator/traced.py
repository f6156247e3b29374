"""``pytest -p tests.tools.emulator.traced``: every test of emulated kernels, with each access to memory followed."""

from tests.tools.emulator import gpu

gpu.DEFAULT["traced"] = True
