"""Drawn calls of mssa where a Hopper GPU is emulated: they reach the kernels of sm_90a."""

import warnings

import pytest

from tests import fuzz
from tests.apart.call import HOPPER
from tests.apart.draw import draw
from tests.apart.judge import judge, within_limit
from tests.apart.machines import quiet, ready

LONG = {"hopper": "long_backward_kernel", "pairs": "long_pairs_kernel"}
SEEDS = (16, 44)  # long backwards: full, and causal with a gradient of lse


@pytest.mark.parametrize("op", [[], ["mssa"], ["tssa"]], ids=["every", "mssa", "tssa"])
def test_mssa_alone_has_them(op):
    assert fuzz.cells(op, HOPPER) == ([] if op == ["tssa"] else [("mssa", backend) for backend in HOPPER])


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", HOPPER)
def test_they_reach_the_kernels(backend, library, threads):
    threads(1)
    with warnings.catch_warnings(), ready(backend):
        quiet()
        library.emulated_launches()
        verdicts = {seed: judge(draw(seed, backend)) for seed in SEEDS}
        launched = library.emulated_launches()
    assert {verdict.status for verdict in verdicts.values()} == {"passed"}
    assert LONG[backend] in launched


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [530, 16684])  # bf16, off by 1.3e-6; fp16, by 2.5e-7
def test_an_lse_near_0_is_a_limit_that_is_documented(seed, library, threads):
    threads(1)
    call = draw(seed, "hopper")
    with warnings.catch_warnings(), ready("hopper"):
        quiet()
        found = judge(call)
    assert found.status == "limit"
    assert not within_limit(call, found.why.replace("lse: error ", "lse: error 9"))
