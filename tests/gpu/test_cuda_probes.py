"""The probes without a GPU: bits under the emulator, and in the machine code of the clocks what each times."""

from itertools import pairwise

import pytest
import torch

from crate_kernels._cuda.sources import Kernel
from tests.cuda import compilers, resources
from tests.gpu import lines, probes, processes, smoke

CPU = torch.device("cpu")
HOPPER = {"capability": 90, "shared_limit": 227 * 1024}
BITS = [pytest.param(item, id=name) for name, item in probes.bits().items()]


@pytest.mark.parametrize("item", BITS)
def test_the_emulator_computes_what_a_gpu_should(item, device):
    device(**HOPPER)
    found = item(CPU)
    assert found["outcome"] in ("passed", "measured"), found
    assert found["expected"] in (found["got"], "at most 1")


@pytest.mark.parametrize("adds", [False, True], ids=["stores", "adds"])
def test_every_place_is_filled_as_often(adds, device):
    device(**HOPPER)
    to = torch.zeros(64, 4)
    probes.fill(adds, to, 64 * 160)
    assert probes.filled(to, 160 if adds else 1)["outcome"] == "passed"
    assert probes.filled(to, 161)["outcome"] == "failed"


def test_a_wrong_bit_is_told():
    got, expected = torch.tensor([[1.0, 2.0], [3.0, 5.0]]), torch.tensor([[1.0, 2.0], [4.0, 4.0]])
    assert probes.same(got, expected) == {"outcome": "failed", "got": 3.0, "expected": 4.0, "place": 2, "wrong": 2}
    nothing = torch.full_like(expected, torch.nan)  # as where a kernel wrote nothing
    assert probes.same(nothing, expected)["wrong"] == 4


def test_probes_are_for_one_architecture(device):
    device(capability=80)
    for _, item in probes.items(CPU):
        with pytest.raises(smoke.Skipped, match="probes are for sm_90a, this is sm_80"):
            item()


def test_bits_come_before_clocks_and_rates_last(tmp_path, monkeypatch):
    monkeypatch.delitem(probes.launch.OPENERS, "cpu", raising=False)
    arguments = ["--out", str(tmp_path), "--seconds", "60", "--dry-run"]
    assert probes.main(arguments) == processes.DONE
    found = lines.results(tmp_path / "probes.jsonl")
    assert {line["outcome"] for line in found.values()} == {"skipped"}
    kinds = [name.split()[0] for name in found]
    assert list(dict.fromkeys(kinds))[:2] == ["product", "unused"]
    assert kinds.index("squares") < kinds.index("clocks") < kinds.index("stores")
    assert kinds[-1] == "red.v4"
    monkeypatch.setattr(probes, "items", lambda device: [("product", lambda: {"outcome": "failed"})])
    assert probes.main(arguments) == processes.FAILED


def test_clocks_are_of_one_instruction_and_not_of_the_first_round(monkeypatch):
    def run(name, shape, found, header):
        assert (shape.blocks, shape.threads, header) == (1, 128, probes.CLOCKS)
        found[0] = torch.tensor([1000, 1001])
        for number in range(1, probes.ROUNDS):
            found[number] = torch.tensor([50 + 8 * 3, 50 + 40 * 3 + 32 * (number > 1)])

    monkeypatch.setattr(probes, "run", run)
    found = probes.clocks("Load", 128, CPU)
    assert {**found, "rounds": len(found["rounds"])} == {
        "outcome": "measured",
        "instruction": "LDSM",
        "clocks": 3.0,
        "median": 4.0,
        "rounds": probes.ROUNDS,
    }


PROBES = (
    *dict.fromkeys(f"product_kernel<{probes.records.CPP_TYPES[dtype]}, {n}>" for dtype, n in probes.WIDTHS),
    "matrices_kernel",
    "rate_kernel<false>",
    "rate_kernel<true>",
)


@pytest.mark.parametrize("name", PROBES)
def test_what_reads_bits_compiles_and_spills_nothing(name):
    _, said = resources.compiled(compilers.needed(), Kernel(probes.BITS, f"probe::{name}"), 90)
    (own,) = (one for one in said if name.partition("<")[0] in one.name)
    assert own.spills == 0


@pytest.fixture(scope="module")
def clocks():
    """Return the kernels that time instructions as machine code for sm_90a, by what they time."""
    from tests.tools.aot import harness

    names = [f"probe::clocks_kernel<probe::{timed}>" for timed in probes.TIMED]
    made = resources.built(compilers.needed(), Kernel(probes.CLOCKS, names[0]), 90, *names[1:])
    said = resources.report.kernels(made.said)
    assert [one.spills for one in said if "clocks_kernel" in one.name] == [0] * len(names)
    functions = {one.name: one for one in harness.disassembled(made.binary)}
    return {timed: functions[made.names[name]] for timed, name in zip(probes.TIMED, names, strict=True)}


@pytest.mark.parametrize("name", probes.TIMED)
def test_between_clocks_is_what_they_time(name, clocks):
    runs, counts = clocks[name].instructions, []
    read = [n for n, one in enumerate(runs) if one.name == "CS2R" and "SR_CLOCK" in one.operands[-1]]
    assert len(read) == 3
    for start, stop in pairwise(read):
        counts.append(sum(one.opcode.startswith(probes.TIMED[name][1]) for one in runs[start:stop]))
    own = name == "Barrier"  # and the one that ends each run
    assert counts == [probes.FEW + own, probes.MANY + own]
