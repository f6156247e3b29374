"""The fuzzer of tests/apart: one round over its classes passes, and its judge sees what is wrong."""

import itertools
import math
import re
import warnings

import pytest
import torch

from tests.apart import judge as judges
from tests.apart import oracle
from tests.apart.attention import ANOTHER, MAY_REFUSE, SAVED, hooks
from tests.apart.call import has_cpp
from tests.apart.draw import draw, seeds_of
from tests.apart.judge import judge
from tests.apart.machines import quiet
from tests.apart.philox import philox
from tests.apart.tolerance import Wrong


@pytest.fixture(autouse=True)
def as_in_the_fuzzer(threads):
    """One thread, and the fuzzer's filters of warnings."""
    threads(1)
    with warnings.catch_warnings():
        quiet()
        yield


@pytest.mark.parametrize("start", range(400, 600, 40))
def test_drawn_calls_of_every_class_pass(start):
    verdicts = {seed: judge(draw(seed)) for seed in range(start, start + 40)}
    assert not {seed: v for seed, v in verdicts.items() if v.status in ("failed", "broken")}


@pytest.mark.skipif(not has_cpp(), reason="needs python -m crate_kernels build")
@pytest.mark.parametrize("operator", ["mssa", "tssa"])
def test_drawn_calls_of_cpp_pass(operator):
    verdicts = {seed: judge(draw(seed, "cpp")) for seed in itertools.islice(seeds_of(operator), 40)}
    assert {v.status for v in verdicts.values()} >= {"passed"}
    assert not {seed: v for seed, v in verdicts.items() if v.status in ("failed", "broken")}


MISTAKES = {
    "value": ("out = out * (1 + 1e-4)", "tolerances: out"),
    "bias": ("out = out + 1e-6 * out.abs().max().detach()", "[12][.0-9]* tolerances: out"),
    "gradient": ("out = out + (w - w.detach()).sum() * 1e-2", "tolerances: dw"),
    "infinite": ("out = out / 0", "out is not finite"),
    "detached": ("out = out.detach()", "does not require grad"),
    "written": ("w.data.add_(1)", "w was written to"),
    "repeated": ("out = out + next(noise)", "other bits"),
    "aliased": ("out = w", "out shares memory with w"),
    "overlapping": ("out = out[..., :1].expand_as(out)", r"out(.transpose.* copies| overlaps itself)"),
    "refused": ("raise ValueError('mssa: w must be something else')", "ValueError: mssa"),
}


@pytest.mark.parametrize(("line", "why"), MISTAKES.values(), ids=MISTAKES)
def test_the_judge_sees(line, why):
    calls = (draw(seed, "composite") for seed in seeds_of("mssa"))
    call = next(call for call in calls if plain(call) and judge(call).status == "passed")
    call.setup.append("import itertools; noise = itertools.count()")
    call.line += "; " + line
    verdict = judge(call)
    assert verdict.status == "failed"
    assert re.search(why, verdict.why), verdict.why


def test_running_sums_round_less_than_what_they_judge():
    values = 1e-3 + torch.linspace(-30, 30, 30_000, dtype=torch.float64).square()
    found = oracle.running_sums(values.view(1, 1, -1, 1)).flatten()
    at = range(999, 30_000, 1000)
    exact = [math.fsum(values[: n + 1].tolist()) for n in at]
    errors = [abs(found[n].item() / total - 1) for n, total in zip(at, exact, strict=True)]
    assert max(errors) <= 4 * torch.finfo(torch.float64).eps


@pytest.mark.skipif(not has_cpp(), reason="needs python -m crate_kernels build")
@pytest.mark.parametrize("seed", [5000307, 5000637, 772165], ids=["slice", "interleaved", "channels-apart"])
def test_gradients_of_ones_are_limits_that_are_documented(seed, monkeypatch):
    call = draw(seed, "cpp")
    found = judge(call)
    assert found.status == "limit"
    monkeypatch.setattr(judges, "error_of_pytorch", lambda call, space: 1e-6)
    assert not judges.within_limit(call, found.why)


TRUSTING = """
class Trusting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        ctx.save_for_backward(w)
        return mssa(w, backend="reference")

    @staticmethod
    def backward(ctx, dout):
        (w,) = ctx.saved_tensors
        if CAREFUL and w.dtype != dout.dtype:
            raise TypeError("w must be as it was")
        w = w.detach().to(dout.dtype).requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(mssa(w, backend="reference"), w, dout)
"""


@pytest.mark.parametrize("careful", [True, False])
@pytest.mark.parametrize("mode", ["saved in another dtype", "saved as it was", "data in other memory"])
def test_the_judge_sees_a_backward_that_trusts_what_it_is_handed(mode, careful):
    """What autograd hands back is refused, or the gradient is right; what did not change is not refused."""
    call = next(call for call in (draw(seed, "composite") for seed in seeds_of("mssa")) if plain(call))
    call.setup += [TRUSTING, f"CAREFUL = {careful}", ANOTHER]
    call.line, call.mode, call.merged = "out = Trusting.apply(w)", mode, False
    if mode in SAVED:
        call.context = hooks(mode)
    verdict = judge(call)
    assert verdict.status == ("passed" if careful or mode not in MAY_REFUSE else "failed"), verdict.why
    assert verdict.status == "passed" or "tolerances: dw" in verdict.why


@pytest.mark.parametrize(
    ("ratio", "over", "luck"),
    [(2.0, 7, True), (2.0, 8, False), (3.1, 0, False), (0.0, 0, False)],
    ids=["some", "most", "far", "no tolerance"],
)
def test_luck_is_what_most_other_numbers_do_not_have(ratio, over, luck, monkeypatch):
    call = draw(next(seeds_of("mssa")), "composite")
    shares = {turn: 1.1 if turn <= over else 0.9 for turn in range(1, judges.REDRAWN + 1)}
    drawn = {judges.redrawn(call, turn).seed: share for turn, share in shares.items()}
    monkeypatch.setattr(judges, "share", lambda other: drawn[other.seed])
    assert judges.by_luck(call, Wrong("", ratio)) == luck


def test_a_call_with_other_numbers_differs_in_its_seed_alone():
    call = draw(1234, "composite")
    other = judges.redrawn(call, 1)
    assert other.setup != call.setup
    assert [line.replace(str(other.seed), "1234") for line in other.setup] == call.setup
    assert other.line == call.line


def plain(call):
    """Whether nothing is special about a call, so that each of its lines can be made wrong."""
    line = re.fullmatch(r"out = mssa\(w, backend='composite'\)", call.line)
    randn = re.match(r"w = w\.to\(torch\.float32\)\.requires_grad_\(\)", call.setup[2])
    large = re.match(r"w = torch\.randn\(\d+, \d+, \d\d+, \d\d+, generator=g\) \* (0.5|1.0)$", call.setup[1])
    return bool(line and randn and large and call.upstream and not call.mode and not call.context)


def test_philox_gives_the_words_of_its_authors():
    # Known answers from the authors' library, Random123.
    assert [int(word) for word in philox((0, 0, 0, 0), (0, 0))] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    assert [int(word) for word in philox(*pi)] == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]
