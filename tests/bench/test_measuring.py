import functools

import pytest
import torch

from crate_kernels import models
from crate_kernels._core.spec import Provider
from crate_kernels.bench import clock, decoding, gate, measuring, memory, networks, overhead, providers
from crate_kernels.bench.gate import Deviation, Gate, judge
from crate_kernels.ops.mssa import spec
from crate_kernels.testing import TIMED_CASES, Case, Timed, make_inputs, run

CPU = torch.device("cpu")
SMALL = {
    "mssa": Case("mssa", "small", (2, 3, 70, 16)),
    "mssa-causal": Case("mssa", "small-causal", (2, 3, 70, 16), {"causal": True}),
    "tssa": Case("tssa", "small", (2, 3, 70, 16)),
    "tssa-causal": Case("tssa", "small-causal", (2, 3, 70, 16), {"causal": True}),
    "ista": Case("ista", "small", (2, 35, 32)),
    "ista_overcomplete": Case("ista_overcomplete", "small", (2, 35, 24, 96)),
}
small = pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)


def timer(call, prepare):
    return clock.host_seconds(call, prepare, CPU, 0.0)


def blank(case, provider, direction="both"):
    return measuring.blank("test", Timed(case, "", ("cpu",)), "fp32", direction, provider)


def measure(case, provider, direction="both"):
    return measuring.measure(blank(case, provider.name, direction), Timed(case, "", ("cpu",)), provider, CPU, timer)


@small
def test_published_form_is_the_reference(case):
    inputs = make_inputs(case, torch.float64)
    exact = run(case, inputs, "reference")["out"]
    actual = providers.eager(case)(*inputs.differentiable.values())
    torch.testing.assert_close(actual, exact, rtol=1e-12, atol=1e-12)


@small
@pytest.mark.parametrize("direction", measuring.DIRECTIONS)
def test_row_of_a_right_provider(case, direction):
    row = measure(case, next(p for p in providers.of(case.op) if p.name == "composite"), direction)
    assert row.skipped == ""
    assert len(row.times) >= 3
    assert min(row.times) > 0
    assert len(row.loop_seconds) == (0 if direction == "backward" else 3)  # which a graph is prepared for
    assert 0 < row.share <= 1
    assert row.peak_bytes > 0


@small
@pytest.mark.parametrize("wrong", ["last token", "gradient", "not a number"])
def test_wrong_provider_gets_no_time(case, wrong):
    right = providers.eager(case)

    class Skewed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, out):
            return out.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * 1.001

    def function(*args):
        out = right(*args)
        if wrong == "gradient":
            return Skewed.apply(out)
        tail = out[..., -1:, :]
        changed = 0.9 * tail if wrong == "last token" else torch.full_like(tail, torch.nan)
        return torch.cat([out[..., :-1, :], changed], -2)

    row = measure(case, Provider("composite", lambda _: function))
    assert row.times == []
    assert row.skipped.startswith("wrong")


def test_forward_is_not_held_to_gradients():
    case = SMALL["mssa"]

    def function(w):
        return spec.published(w.detach())

    row = measure(case, Provider("eager", lambda _: function), "forward")
    assert row.times != []


def test_provider_that_cannot_says_why():
    case = SMALL["mssa"]
    named = {p.name: p for p in providers.of("mssa")}
    assert "GPUs" in measure(case, named["sdpa-cudnn"]).skipped
    assert "backward" in measure(case, named["flex"]).skipped


def test_flex_attention_gets_a_leaf_only_where_gradients_are_asked_for(monkeypatch):
    """On a CPU it refuses a leaf that wants a gradient, also where none is computed."""
    wanted = []
    monkeypatch.setattr(torch, "compile", lambda *_, **__: lambda q, *_, **__: wanted.append(q.requires_grad) or q)
    (flex,) = (p for p in providers.of("mssa") if p.name == "flex")
    case = SMALL["mssa"]
    call, w = flex.make(case), torch.randn(case.shape, requires_grad=True)
    for mode in (torch.no_grad(), torch.enable_grad()):
        with mode:
            call(w)
    assert wanted == [False, True]


@pytest.mark.parametrize("provider", overhead.PROVIDERS)
@pytest.mark.parametrize("op", overhead.OPS)
def test_tiny_calls_of_every_operator_are_timed(op, provider, monkeypatch):
    monkeypatch.setattr(overhead, "CALLS", 1)
    row = overhead.measure(overhead.blank(op, provider), CPU, timer)
    assert min(row.seconds) > 0


def test_out_of_memory_is_a_row():
    def function(w):
        torch.empty(1 << 50, dtype=torch.int8)

    provider = Provider("eager", lambda _: function)
    assert measure(SMALL["mssa"], provider).skipped == "out of memory"


def test_other_errors_are_not_hidden():
    def function(w):
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        measure(SMALL["mssa"], Provider("eager", lambda _: function))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_oracle_by_rows_is_autograd(causal, monkeypatch):
    monkeypatch.setattr("crate_kernels.ops.mssa.baselines._ROWS", 32)
    case = Case("mssa", "rows", (1, 1, 70, 16), {"causal": causal})
    gate = Gate(case, torch.float64, CPU)
    out = providers.eager(case)(*gate.args)
    from crate_kernels.bench.gate import upstream

    (dw,) = torch.autograd.grad(out, gate.args, upstream(out))
    for actual, expected in zip(gate.exact, (out, dw), strict=True):
        torch.testing.assert_close(actual[0], expected[0, 0].detach(), rtol=1e-12, atol=1e-12)


def test_work_is_counted_as_the_flop_counter_does():
    from torch.utils.flop_counter import FlopCounterMode

    case = SMALL["mssa"]
    gate = Gate(case, torch.float32, CPU)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        spec.published(gate.args[0])
    assert blank(case, "eager", "forward").flops == counter.get_total_flops()
    assert blank(SMALL["mssa-causal"], "eager", "both").flops == 3.5 * blank(case, "eager", "forward").flops / 2
    assert blank(SMALL["tssa"], "eager", "both").flops is None
    assert blank(case, "eager", "forward").bytes == 4 * 2 * 2 * 3 * 70 * 16


def test_peak_memory_counts_what_is_held_at_once():
    def hold_two_of_three():
        first = torch.empty(1 << 18)
        second = torch.empty(1 << 18)
        del first
        third = torch.empty(1 << 17)
        return second, third

    assert memory.peak_bytes(hold_two_of_three, CPU) == 2 << 20


NAN = float("nan")
JUDGED = {  # error, eager's error and size of the second output
    "sound": ((1.0, 1.0, 1.0), True),
    "wrong": ((3.0, 1.0, 1.0), False),
    "not a number": ((NAN, 1.0, 1.0), False),
    "and eager's is none either": ((NAN, NAN, 1.0), False),
    "wrong where eager overflows": ((1.0, float("inf"), 1.0), False),
    "sound where eager overflows": ((0.0, float("inf"), 1.0), True),
    "no exact result": ((NAN, NAN, NAN), False),
}


@pytest.mark.parametrize(("numbers", "passed"), JUDGED.values(), ids=JUDGED)
def test_the_gate_opens_for_numbers_only(numbers, passed):
    assert judge([Deviation("out", 0.1, 1.0, 1.0), Deviation("second", *numbers)], torch.float32).passed == passed


def test_a_gate_serves_its_case_dtype_and_device_alone(monkeypatch):
    made = []

    class Noted:
        def __init__(self, *key):
            self.case, self.dtype, self.device = key
            made.append(key)

    monkeypatch.setattr(gate, "Gate", Noted)
    monkeypatch.setattr(gate, "_last", [])
    base = (SMALL["mssa"], torch.float32, CPU)
    for place, other in enumerate((SMALL["tssa"], torch.bfloat16, torch.device("meta"))):
        changed = (*base[:place], other, *base[place + 1 :])
        for key in (base, base, changed, changed):
            kept = gate.gate(*key)
            assert (kept.case, kept.dtype, kept.device) == key
        assert made == [base, changed]
        made.clear()


INFERENCE = {  # device types without a backward pass, direction, whether a CPU times it
    "forward": (("cpu",), "forward", True),
    "backward": (("cpu",), "backward", False),
    "both": (("cpu",), "both", False),
    "elsewhere": (("cuda",), "both", True),
}


@pytest.mark.parametrize(("without", "direction", "timed"), INFERENCE.values(), ids=INFERENCE)
def test_a_provider_without_a_backward_pass_is_timed_forward_alone(without, direction, timed):
    case = SMALL["tssa"]
    row = measure(case, Provider("eager", providers.eager, inference_only=without), direction)
    assert bool(row.times) is timed
    assert row.skipped == ("" if timed else "eager has no backward pass on this device")


def test_timed_cases_have_names_of_their_own():
    keys = [(t.case.op, t.case.name, t.devices) for t in TIMED_CASES]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("name", ["crate_small", "tost_small_12", "crate_lm_base", "tost_lm_base"])
def test_published_form_of_a_model_is_the_model(name):
    size = {"depth": 1} if not name.endswith("lm_base") else {"n_layer": 1, "vocab_size": 11, "block_size": 16}
    torch.manual_seed(0)
    model = models.create(name, **size).double().eval()
    generator = torch.Generator().manual_seed(0)
    if "lm" in name:
        x = torch.randint(11, (1, 9), generator=generator)
    else:
        x = torch.randn(1, 3, 224, 224, generator=generator, dtype=torch.float64)
    plain = networks.published_form(model)
    assert not any(type(m) in networks._FORMS for m in plain.modules() if not isinstance(m, networks._Plain)) or all(
        isinstance(parent, networks._Plain)
        for parent in plain.modules()
        for child in parent.children()
        if type(child) in networks._FORMS
    )
    with torch.no_grad():
        torch.testing.assert_close(networks._logits(plain, x), networks._logits(model, x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("op", "provider"), [(op, name) for op in ("mssa", "tssa") for name in decoding.providers_of(op)]
)
def test_decoding_step(op, provider):
    step = decoding.TimedStep(op, (2, 3, 20, 16), ("cpu",))
    row = decoding.measure(decoding.blank(step, "fp32", provider), step, CPU, timer)
    assert row.skipped != "" or row.share <= 1
    assert row.skipped == "" or provider in ("triton", "cpp", "flash-attn")


@pytest.mark.parametrize("provider", decoding.TEXT_PROVIDERS)
def test_text(provider, monkeypatch):
    small = functools.partial(models.create, n_layer=1, n_embd=48, n_head=2, block_size=32)
    monkeypatch.setattr(models, "create", small)
    text = decoding.GeneratedText("crate_lm_base", 2, 5, 4, "cpu", "fp32")
    row = decoding.measure_text(decoding.blank_text(text, provider), text, CPU, timer)
    assert row.skipped == ("" if provider != "default-graphed" else "CUDA graphs are for CUDA devices")
    assert row.amount == 8


@pytest.mark.parametrize(("factor", "right"), [(1.0, True), (1.5, False), (float("nan"), False)])
def test_a_wrong_network_gets_no_time(factor, right, monkeypatch):
    small = functools.partial(models.create, n_layer=1, n_embd=48, n_head=2, block_size=16)
    model = networks._model

    def scaled(network, provider, *where):
        made = model(network, provider, *where)
        if provider == "composite":
            next(p for p in made.parameters() if p.dim() == 2).data.mul_(factor)
        return made

    monkeypatch.setattr(models, "create", small)
    monkeypatch.setattr(networks, "_model", scaled)
    network = networks.Network("crate_lm_base", "tokens", 2, None, seqlen=8)
    row = networks.measure(networks.blank(network, "fp32", "forward", "composite"), network, CPU, timer)
    assert bool(row.times) is right
    assert row.skipped.startswith("" if right else "wrong: logits has ")


@pytest.mark.parametrize(("direction", "times"), [("forward", 2), ("backward", 5), ("both", 7)])
def test_the_work_of_a_direction(direction, times):
    row = blank(SMALL["mssa"], "eager", direction)
    amounts = measuring.SPECS["mssa"].work(SMALL["mssa"])
    share = {"forward": (1, 0), "backward": (0, 1), "both": (1, 1)}[direction]
    assert row.flops == sum(s * f for s, f in zip(share, amounts.flops, strict=True))
    assert row.bytes == 4 * sum(s * e for s, e in zip(share, amounts.elements, strict=True))
    assert (row.bench, row.op, row.case, row.dtype, row.direction) == ("test", "mssa", "small", "fp32", direction)
    assert (row.shape, row.options, row.sweep) == ([2, 3, 70, 16], {}, "")
    half = measuring.blank("test", Timed(SMALL["mssa"], "", ("cpu",)), "bf16", direction, "eager")
    assert half.bytes == row.bytes / 2


def test_a_verdict_has_the_largest_share_and_its_name():
    found = [Deviation("a", 1e-3, 1e-3, 2.0), Deviation("b", 3e-3, 0.0, 1.0, 3.0), Deviation("c", 1e-4, 1e-5, 9.0)]
    verdict = judge(found, torch.bfloat16)
    eps = torch.finfo(torch.bfloat16).eps
    assert verdict.share == pytest.approx(3e-3 / (3 * eps))
    assert (verdict.output, verdict.error, verdict.times_eager) == ("b", 3e-3, pytest.approx(10.0))
    assert verdict.passed
    assert judge([Deviation("a", 2 * eps, 0.0, 1.0)], torch.bfloat16).passed  # up to 1
    assert not judge([Deviation("a", 2.01 * eps, 0.0, 1.0)], torch.bfloat16).passed


def test_what_has_no_cache_or_tiny_call_says_so(monkeypatch):
    with pytest.raises(ValueError, match="ista has no cache"):
        decoding.providers_of("ista")
    op = next(op for op, spec in overhead.SPECS.items() if not spec.tiny)
    with pytest.raises(ValueError, match=f"{op} has no tiny call"):
        overhead.measure(overhead.blank(op, "public"), CPU, timer)
    step = decoding.TimedStep("mssa", (2, 3, 20, 16), ("cpu",))
    monkeypatch.setattr(decoding, "find_spec", lambda name: name)
    reasons = {
        (device, dtype): decoding._unavailable_reason(step, "flash-attn", dtype, torch.device(device))
        for device in ("cpu", "cuda")
        for dtype in (torch.float32, torch.bfloat16)
    }
    assert [each for each, reason in reasons.items() if reason is None] == [("cuda", torch.bfloat16)]
    assert set(reasons.values()) == {None, "flash-attn takes half precision on GPUs"}
    row = decoding.blank(step, "bf16", "eager")
    assert (row.bench, row.case, row.unit, row.amount, row.shape) == (
        "decode", "2x3x16-cached-20", "tokens", 2.0, [2, 3, 20, 16]
    )  # fmt: skip
    assert (row.bytes or 0) * 2 == decoding.blank(step, "fp32", "eager").bytes


@pytest.mark.parametrize(("kind", "resident"), [("cpu", 7), ("cuda", None)])
def test_resident_memory_is_measured_on_a_cpu(kind, resident, monkeypatch):
    monkeypatch.setattr(measuring.memory, "peak_bytes", lambda call, device: 5)
    monkeypatch.setattr(measuring.memory, "resident_bytes", lambda call: 7)
    monkeypatch.setattr(measuring.clock, "loop_seconds", lambda *_: [])
    monkeypatch.setattr(measuring.clock, "device_seconds", lambda *_: None)
    row = blank(SMALL["mssa"], "eager")
    measuring.record_times(row, lambda: None, tuple, torch.device(kind), lambda *_: [1.0])
    assert (row.seconds, row.peak_bytes, row.resident_bytes) == ([1.0], 5, resident)
