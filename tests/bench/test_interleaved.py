"""Benchmarks beside the warm ones: interleaved providers, and their columns."""

import functools

import pytest
import torch

from benchmarks import tables
from crate_kernels import models
from crate_kernels.bench import interleaved, networks, providers
from crate_kernels.bench.rows import BenchRow, Results
from crate_kernels.testing import Case, Timed

CPU = torch.device("cpu")
MACHINE = {"gpu": False}
CASE = Timed(Case("tssa", "small", (2, 3, 70, 16)), "", ("cpu",))
FAST = [p for p in providers.of("tssa") if p.name in ("eager", "composite")]


@pytest.mark.parametrize("direction", interleaved.DIRECTIONS)
def test_every_provider_is_timed_as_often(direction, monkeypatch):
    order = []
    once = interleaved.measuring.timed_call
    monkeypatch.setattr(interleaved, "_BETWEEN", 64)

    def noted(function, args, direction):
        call, prepare = once(function, args, direction)
        name = FAST[len({n for n, _ in order})].name
        order.append((name, False))
        return lambda: (order.append((name, True)), call()), prepare

    monkeypatch.setattr(interleaved.measuring, "timed_call", noted)
    rows = [interleaved.blank(CASE, "fp32", direction, p.name) for p in FAST]
    interleaved.measure(rows, CASE, FAST, CPU, 0.0)
    assert [len(row.seconds) for row in rows] == [5, 5]
    assert all(0 < row.share <= 1 and row.load is not None for row in rows)
    called = [name for name, timed in order if timed]
    rounds = [tuple(called[at : at + 2]) for at in range(0, len(called), 2)]
    assert len(rounds) == 7  # two of them to warm up
    assert set(rounds) == {("eager", "composite"), ("composite", "eager")}  # none always follows the same one


@pytest.mark.parametrize("direction", ["forward", "step"])
def test_interleaved_models_are_checked_and_timed_as_often(direction, monkeypatch):
    monkeypatch.setattr(interleaved, "_BETWEEN", 64)
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model, **_: (compiled.append(model), model)[1])
    network = networks.Network("crate_lm_base", "tokens", 1, None, seqlen=8)
    small = functools.partial(models.create, n_layer=1, n_embd=48, n_head=2, block_size=16)
    monkeypatch.setattr(networks.models, "create", small)
    found = networks.blank_interleaved(network, "fp32", direction)
    networks.measure_interleaved(found, network, CPU, 0.0)
    assert {row.provider for row in found} == {"eager", "compile", "composite", "default", "default-compiled"}
    assert len(compiled) == 2
    assert [len(row.seconds) for row in found] == [5] * len(found)
    assert all(0 < row.share <= 1 and row.amount == 8 for row in found)


def test_wrong_provider_gets_no_time_interleaved():
    wrong = interleaved.Provider("wrong", lambda case: lambda w, temp: w)
    rows = [interleaved.blank(CASE, "fp32", "forward", name) for name in ("eager", "wrong")]
    interleaved.measure(rows, CASE, [FAST[0], wrong], CPU, 0.0)
    assert rows[0].times
    assert rows[1].skipped.startswith("wrong")
    assert not rows[1].times


INFERENCE = {  # device types without a backward pass, direction, whether a CPU times it
    "forward": (("cpu",), "forward", True),
    "both": (("cpu",), "both", False),
    "elsewhere": (("cuda",), "both", True),
}


@pytest.mark.parametrize(("without", "direction", "timed"), INFERENCE.values(), ids=INFERENCE)
def test_a_provider_without_a_backward_pass_is_timed_forward_alone_interleaved(without, direction, timed, monkeypatch):
    monkeypatch.setattr(interleaved, "_BETWEEN", 64)
    rows = [interleaved.blank(CASE, "fp32", direction, name) for name in ("eager", "limited")]
    limited = interleaved.Provider("limited", FAST[0].make, inference_only=without)
    interleaved.measure(rows, CASE, [FAST[0], limited], CPU, 0.0)
    assert [bool(row.times) for row in rows] == [True, timed]
    assert rows[1].skipped == ("" if timed else "limited has no backward pass on this device")


def test_interleaved_time_is_the_median():
    row = BenchRow("interleaved", "tssa", "small", "fp32", "forward", "eager", seconds=[1.0, 2.0, 9.0])
    assert row.time == 2.0


def model_rows(*names):
    found = []
    for direction in ("forward", "step"):
        for name in names:
            row = BenchRow("models", "model", "crate_small", "fp32", direction, name, unit="images", amount=8.0)
            row.seconds = [{"default": 1.0, "eager": 2.0, "compile": 3.0, "default-compiled": 1.5}[name]]
            found.append(row)
    return found


def test_columns_appear_with_their_providers():
    assert "default-compiled" in networks.PROVIDERS
    old = tables._models(Results(MACHINE, model_rows("eager", "compile", "default")))
    new = tables._models(Results(MACHINE, model_rows("eager", "compile", "default-compiled", "default")))
    assert "compiled" not in old
    header, _, line = new.splitlines()
    cells = dict(zip(header.split(" | "), line.split(" | "), strict=True))
    assert cells["both compiled"] == "2.00 / 2.00"


COMPILED = {
    "eager": None,
    "default": None,
    "compile": {},
    "default-compiled": {},
    "compile-graphed": {"mode": "reduce-overhead"},
    "default-graphed": {"mode": "reduce-overhead"},
}


@pytest.mark.parametrize(("provider", "options"), COMPILED.items(), ids=COMPILED)
def test_models_are_compiled_as_their_provider_says(provider, options, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model, dynamic, **more: (compiled.append(more), model)[1])
    network = networks.Network("crate_lm_base", "tokens", 1, None, seqlen=8)
    monkeypatch.setattr(networks.models, "create", functools.partial(models.create, n_layer=1, n_embd=48, n_head=2))
    row = networks.blank(network, "fp32", "forward", provider)
    model = networks._model(network, provider, torch.float32, CPU)
    networks._call(row, network, model, torch.float32, CPU)()
    assert compiled == ([] if options is None else [options])
    published = any(isinstance(module, networks._Plain) for module in model.modules())
    assert published == (provider.partition("-")[0] in ("eager", "compile"))
    graphed = networks.unavailable_reason(network, provider, CPU)
    assert graphed == ("CUDA graphs are for GPUs" if "graphed" in provider else None)


def test_table_of_models_interleaved():
    found = model_rows("eager", "compile", "default-compiled", "default")
    for row in found:
        row.bench = "interleaved"
    line = tables._models_interleaved(Results(MACHINE, found)).splitlines()[-1]
    assert line == "| crate_small | fp32 | 1000 / 1000 | 2.00 / 2.00 | 3.00 / 3.00 | - / - | 2.00 / 2.00 |"


def test_columns_of_calls_interleaved():
    found = []
    for bench, ours in (("tssa", 1.0), ("interleaved", 2.0)):
        for provider, seconds in (("default", ours), ("eager", 6.0)):
            row = BenchRow(bench, "tssa", "small", "fp32", "forward", provider, shape=[1])
            row.seconds = [seconds]
            found.append(row)
    header, _, line = tables._speed(Results(MACHINE, found), "tssa", ["eager"]).splitlines()
    assert header.endswith("| eager | eager, interleaved |")
    assert line.endswith("| 6.00 / - | 3.00 / - |")
    assert "interleaved" not in tables._speed(Results(MACHINE, found[:2]), "tssa", ["eager"])
