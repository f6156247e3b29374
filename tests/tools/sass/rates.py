"""What a multiprocessor does per clock, per architecture.

Sources: the table of arithmetic throughput in NVIDIA's CUDA C++ programming guide (results per clock and
multiprocessor: fp32 arithmetic, special functions, integers, comparisons, conversions, shuffles), its table of compute
capabilities (registers, shared memory, warps and blocks), and the tensor rates and memory bandwidths that NVIDIA
states for A100 SXM 80 GB, H200 SXM and B200, divided by multiprocessors and boost clock. Pipes whose rate is not
published cost their issue only.
"""

from dataclasses import dataclass

WARP = 32


@dataclass(frozen=True)
class Rates:
    """Per multiprocessor and clock, unless said otherwise.

    Attributes:
        lanes: results by pipe: "mufu", "fp32", "alu" (integers, comparisons, selections, conversions), "imad"
            (integer multiply-adds), "half" (instructions of packed 16-bit numbers), "double", "shuffle".
        tensor: multiply-adds of 16-bit numbers in the tensor cores; of 32-bit ones half, of 8-bit ones double.
        shared: bytes of shared memory read or written.
        memory: bytes from the GPU's memory, if all multiprocessors read.
        latency: clocks from a load to its data under load: an assumption, for the bytes that must be in flight.
        registers, shared_size, warps, blocks: of a multiprocessor, not per clock.
    """

    lanes: dict
    tensor: int
    memory: float
    shared_size: int
    latency: int = 1300
    shared: int = 128
    issue: int = 4
    registers: int = 65536
    warps: int = 64
    blocks: int = 32

    @property
    def in_flight(self):
        """The bytes in flight that keep the memory busy (Little's law)."""
        return self.memory * self.latency


def _lanes(fp32, double, half=128):
    return {"mufu": 16, "fp32": fp32, "alu": 64, "imad": 64, "half": half, "double": double, "shuffle": 32}


def _per_clock(bandwidth, multiprocessors, clock):
    return bandwidth / (multiprocessors * clock)


KIB = 1024
RATES = {
    "sm_80": Rates(_lanes(64, 32), 1024, _per_clock(2039e9, 108, 1.41e9), 164 * KIB),
    "sm_90": Rates(_lanes(128, 64), 2048, _per_clock(4800e9, 132, 1.83e9), 228 * KIB),
    "sm_100": Rates(_lanes(128, 64), 4096, _per_clock(8000e9, 148, 1.85e9), 228 * KIB),
}
# Registers are given to a warp by 256, shared memory to a block by 128 bytes after 1 KiB of the system's own.
_REGISTER_UNIT, _SHARED_UNIT, _RESERVED = 256, 128, KIB


def blocks(rates, registers, shared, warps):
    """Return how many blocks of ``warps`` warps a multiprocessor holds at a time."""
    of_warp = -(-registers * WARP // _REGISTER_UNIT) * _REGISTER_UNIT
    of_block = -(-shared // _SHARED_UNIT) * _SHARED_UNIT + _RESERVED
    # Registers are divided among the four quarters, warps among them in turn.
    by_registers = rates.registers // 4 // max(of_warp, 1) * 4 // warps
    return min(by_registers, rates.shared_size // of_block, rates.warps // warps, rates.blocks)
