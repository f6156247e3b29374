"""Every kernel that a planner launches is compiled by NVRTC, and takes no more registers than recorded."""

import json
import re
from types import SimpleNamespace

import pytest

from crate_kernels._cuda import cubins, sources
from crate_kernels.ops.mssa.cuda import heads
from tests.cuda import compilers, resources

RECORDED = json.loads(resources.RECORDED.read_text())
FEW = 8  # kernels of an operator, which the usual suite compiles


@pytest.mark.parametrize("capability", resources.CAPABILITIES)
@pytest.mark.parametrize(
    "op",
    [
        pytest.param(op, marks=() if len(resources.kernels(op)) <= FEW else pytest.mark.exhaustive)
        for op in resources.PLANNED
    ],
)
def test_registers_and_spills_do_not_grow(op, capability):
    compiler = compilers.needed()
    found = resources.measured(compiler, op, capability)
    recorded = RECORDED["kernels"][op][f"sm_{capability}"]
    assert found.keys() == recorded.keys()
    if "{}.{}".format(*compiler.version) != RECORDED["nvrtc"]:
        pytest.skip(f"needs NVRTC {RECORDED['nvrtc']}, of which registers are recorded")
    grown = {name: (recorded[name], now) for name, now in found.items() if any(map(int.__gt__, now, recorded[name]))}
    assert grown == {}


@pytest.mark.parametrize("capability", resources.CAPABILITIES)
@pytest.mark.parametrize("op", resources.PLANNED)
def test_the_record_is_of_every_kernel(op, capability):
    def steps(names):
        return sorted(re.sub(r"\((\w+)\)\d+|(\w+Step)::\w+", r"\1\2", name) for name in names)  # NVRTC counts an enum

    listed = steps(kernel.name for kernel in resources.kernels(op, capability))
    assert listed == steps(RECORDED["kernels"][op][f"sm_{capability}"])


# Of sm_90a alone: one of each kind, which the usual suite compiles too.
HOPPER = (
    "head_forward_kernel<bf16, 64, 208, false>",
    "head_backward_kernel<bf16, 64, 208, false, false>",
    "head_backward_kernel<bf16, 128, 208, true, false>",
    "long_forward_kernel<bf16, 64, true>",
    "long_backward_kernel<bf16, 64, false>",
    "long_pairs_kernel<bf16, 64, false>",
)


@pytest.mark.parametrize("name", HOPPER)
def test_a_kernel_of_hopper_spills_nothing(name):
    compiler = compilers.needed()
    (kernel,) = (one for one in resources.kernels("mssa", 90) if one.name == f"mssa::{name}")
    assert kernel not in resources.kernels("mssa", 80)
    (found,) = resources.compiled(compiler, kernel, 90)[1]
    assert found.spills == 0
    if "{}.{}".format(*compiler.version) == RECORDED["nvrtc"]:
        assert found.registers <= RECORDED["kernels"]["mssa"]["sm_90"][kernel.name][0]


@pytest.mark.parametrize(
    ("name", "wait"),
    [
        ("long_backward_kernel<bf16, 64, false>", "    wgmma_wait<BEHIND>();\n"),
        ("head_backward_kernel<bf16, 64, 208, false, false>", "    wgmma_wait<0>();\n    pin(t);\n"),
    ],
)
def test_a_wait_that_the_assembler_adds_is_seen(name, wait, monkeypatch):
    (kernel,) = (one for one in resources.kernels("mssa", 90) if one.name == f"mssa::{name}")
    texts = sources.headers(kernel.header)
    changed = {path: text.replace(wait, "") for path, text in texts.items()}
    assert sum(changed[path] != texts[path] for path in texts) == 1
    monkeypatch.setattr(sources, "headers", lambda header: changed)
    with pytest.raises(AssertionError, match=r"\(C75\d\d\)"):
        resources.built(compilers.needed(), kernel, 90)


@pytest.mark.exhaustive
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", range(16, 129, 16))
def test_no_kernel_of_whole_heads_spills(dim, causal):
    """Of any length; registers are recorded of a few."""
    compiler, every = compilers.needed(), heads.every_kernel(dim, causal)
    found = [one for kernel in every for one in resources.compiled(compiler, kernel, 90)[1]]
    assert len(found) == len(every) > 0
    assert {one.name: one.spills for one in found if one.spills} == {}


def test_a_part_is_recorded_and_the_rest_is_left(tmp_path, monkeypatch):
    path, asked = tmp_path / "resources.json", []
    old = {"nvrtc": "9.9", "kernels": {"ista": {"sm_80": {"a": [1, 2, 3]}, "sm_90": {}}, "tssa": {"sm_90": {}}}}
    path.write_text(json.dumps(old))
    monkeypatch.setattr(resources, "RECORDED", path)
    monkeypatch.setattr(compilers, "found", lambda: SimpleNamespace(version=(9, 9)))
    monkeypatch.setattr(resources, "measured", lambda compiler, *of: (asked.append(of), {"b": [4, 5, 6]})[1])
    resources.main(["--op", "ista", "--arch", "90"])
    assert asked == [("ista", 90)]
    made = json.loads(path.read_text())
    assert made == {**old, "kernels": {**old["kernels"], "ista": {**old["kernels"]["ista"], "sm_90": {"b": [4, 5, 6]}}}}
    assert '"a": [1, 2, 3]' in path.read_text()
    monkeypatch.setattr(compilers, "found", lambda: SimpleNamespace(version=(9, 8)))
    with pytest.raises(SystemExit):
        resources.main(["--arch", "90"])
    resources.main([])
    assert json.loads(path.read_text())["nvrtc"] == "9.8"


@pytest.mark.parametrize("arguments", [["--op", "nothing"], ["--arch", "70"], ["ista"]], ids=" ".join)
def test_what_is_no_part_is_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        resources.main(arguments)
    assert "error" in capsys.readouterr().err


def test_what_is_recorded_fits_every_gpu_and_spills_nothing():
    for by_arch in RECORDED["kernels"].values():
        for arch, kernels in by_arch.items():
            for name, (registers, spills, shared) in kernels.items():
                assert 0 < registers <= 255, (arch, name)
                assert spills == 0, (arch, name)
                assert shared <= 48 * 1024, (arch, name)


STANDARD = """#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
static_assert(sizeof(int64_t) == 8 && sizeof(uint16_t) == 2 && sizeof(uintptr_t) == 8, "");
static_assert(std::is_same_v<std::conditional_t<true, int, float>, std::remove_const_t<const int>>, "");
__global__ void f(float* to, double* wide) {
  const uint32_t bits = 5;
  memcpy(to, &bits, sizeof(bits));
  to[1] = INFINITY + NAN + FLT_MAX;
  wide[0] = -HUGE_VAL;
}
"""


def test_kernels_have_of_the_standard_headers_what_they_use():
    made = compilers.needed().compile(STANDARD, "sm_80", cubins.OPTIONS, sources._STANDARD, ["f"])
    assert made.names == {"f": "_Z1fPfPd"}
