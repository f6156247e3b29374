"""What has been wrong before is among what is drawn: each class is counted over the first seeds of an operator."""

import itertools
import re

import pytest
import torch

from tests.apart.attention import CHANGED, SAVED
from tests.apart.call import HEAD
from tests.apart.draw import ORDER, draw, seeds_of

CALLS = 1500  # a class of few calls has a mode of few of them
TILE = 64
pytestmark = pytest.mark.usefixtures("threads")  # a drawn call may set their number


def tensors(call):
    """Return the tensors of a call, and of every step of a program, by name and number."""
    space = {}
    exec("\n".join([*HEAD, *call.setup]), space)
    found = [space.copy()]
    for step in call.steps:
        *lines, _ = step["lines"]
        exec("\n".join(lines), space)
        found.append(space.copy())
    names = ("w", "x", "weight", "mask", "bounds", "bias", "index", "keep", "dout", "dlse", "dmembership")
    return [{name: some[name].detach() for name in names if name in some} for some in found]


def strided(name):
    return lambda call, t: name in t and t[name].numel() > 1 and not t[name].is_contiguous()


def offset(name):
    return lambda call, t: name in t and t[name].storage_offset() > 0


def expanded(*names):
    return lambda call, t: any(name in t and t[name].numel() > 1 and 0 in t[name].stride() for name in names)


def whole_row_padded(call, t):
    return "mask" in t and t["mask"].numel() > 0 and not t["mask"].any(1).all()


def padded_for_a_tile(side):
    def found(call, t):
        if "mask" not in t or t["mask"].shape[1] <= TILE:
            return False
        edge = t["mask"][:, :TILE] if side == "left" else t["mask"][:, -TILE:]
        return bool((t["mask"].any(1) & ~edge.any(1)).any())

    return found


def far_padding(call, t):
    return "mask" in t and "torch.where(mask" in "\n".join([*call.setup, call.line]) and not t["mask"].all()


def scores(call, t):
    w = t["w"].double()
    return w @ w.transpose(-1, -2) if w.ndim == 4 and w.numel() else torch.zeros(1)


def overflow_in_scores(call, t):
    return t["w"].dtype == torch.float16 and bool((scores(call, t).abs() > 65504).any())


def saturated_with_dropout(call, t):
    if "dropout_p" not in call.line:
        return False
    if call.op == "tssa":
        return "saturated" in call.kind
    own = scores(call, t).diagonal(dim1=-2, dim2=-1) if t["w"].ndim == 4 and t["w"].numel() else torch.zeros(1)
    return bool(own.max() * t["w"].shape[-1] ** -0.5 > 30)


def huge_bias(call, t):
    return "bias" in t and bool(((t["bias"].abs() > 1e3) & t["bias"].isfinite()).any())


def infinite_bias(call, t):
    return "bias" in t and bool((t["bias"] == -torch.inf).any())


def mode(*names):
    return lambda call, t: call.mode in names


def some_inputs(count):
    return lambda call, t: bool(call.wrt) and len(call.wrt) < count


def in_line(pattern):
    return lambda call, t: re.search(pattern, call.context + call.line) is not None


def empty(call, t):
    return any(name in t and t[name].numel() == 0 for name in ("w", "x"))


def length(*sizes):
    return lambda call, t: "w" in t and t["w"].ndim == 4 and t["w"].shape[2] in sizes


def width(*sizes):
    return lambda call, t: any(name in t and t[name].shape[-1] in sizes for name in ("w", "x"))


def transformed(call, t):
    return call.kind.endswith("transforms")


def sink(call, t):
    norms = t["w"].double().norm(dim=-1)
    return norms.ndim == 3 and norms.numel() > 0 and bool((norms.amax(-1) > 5 * norms.median(-1).values).any())


def ones(call, t):
    """One number as the gradient of every output, of tokens that are normed."""
    if "dout" not in t or t["dout"].numel() < 2 or not (t["dout"] == t["dout"].flatten()[0]).all():
        return False
    x = t["w"] if "w" in t else t["x"]
    return call.op.startswith("ista") or bool(x.double().mean(-1).abs().max() < 0.02)


def moving_mean(call, t):
    if "w" not in t or t["w"].ndim != 4 or t["w"].shape[2] < 1000:
        return False
    first, *_, last = t["w"].double().chunk(10, 2)
    return bool((first.mean(2) - last.mean(2)).norm(dim=-1).max() > 1)


def long_decode(call, t):
    return moving_mean(call, t) and "cache=cache" in call.line


OUTSIDE = {  # classes of what users found, and what their calls are to have
    "mssa sinks": sink, "mssa ones": ones, "tssa ones": ones, "ista ones": ones, "ista_overcomplete ones": ones,
    "tssa drifting": moving_mean, "tssa cache drifting": long_decode, "mssa saved": mode(*SAVED), "tssa saved":
    mode(*SAVED), "ista saved": mode(*SAVED), "ista_overcomplete saved": mode(*SAVED),
}  # fmt: skip


ANY = {
    "autocast": in_line("autocast"), "no grad": in_line("no_grad"), "inference mode": in_line("inference_mode"),
    "zero-size": empty, "in place": mode("add", "double", "part"), "grad of grad": mode("grad of grad"),
    "leaf overwritten": mode("overwritten"), "strided gradient": strided("dout"),
    "expanded gradient": expanded("dout"), "one channel": width(1), "a vector": width(15, 16, 17),
    "a tile wide": width(63, 64, 65), "two tiles wide": width(127, 128, 129), "widest": width(255, 256),
    "transformed": transformed, "ones": ones, "saved by a hook": mode(*SAVED), "changed by its owner": mode(*CHANGED),
}  # fmt: skip
ATTENTION = ANY | {
    "strided offsets": strided("bounds"), "offset offsets": offset("bounds"), "strided mask": strided("mask"),
    "expanded mask": expanded("mask"), "row without keys": whole_row_padded, "far padding": far_padding,
    "padding left of a tile": padded_for_a_tile("left"), "padding right of a tile": padded_for_a_tile("right"),
    "saturated with dropout": saturated_with_dropout, "second output in place": mode("second"),
    "some outputs": lambda call, t: 0 < len(call.upstream) < len(call.outputs),
    "one token": length(1), "a tile of tokens": length(63, 64, 65),
}  # fmt: skip
CACHE = {
    "strided index": strided("index"), "strided mask": strided("mask"),
    "row without keys": whole_row_padded, "far padding": far_padding, "one token": length(1),
    "no grad": in_line("no_grad"), "inference mode": in_line("inference_mode"),
}  # fmt: skip
BIASED = {
    "infinite bias": infinite_bias, "huge bias": huge_bias, "strided bias": strided("bias"),
    "offset bias": offset("bias"), "expanded bias": expanded("bias"),
}  # fmt: skip
CLASSES = {
    "mssa": ATTENTION | {"overflow of fp16 in scores": overflow_in_scores, "sink": sink},
    "mssa cache": CACHE | {"strided lengths": strided("keep")},
    "tssa": ATTENTION | BIASED | {"some inputs": some_inputs(2), "moving mean": moving_mean},
    "tssa cache": CACHE | {"infinite bias": infinite_bias, "huge bias": huge_bias, "long decode": long_decode},
    "ista": ANY | {"some inputs": some_inputs(2), "strided weight": strided("weight")},
    "ista_overcomplete": ANY | {"some inputs": some_inputs(2), "strided weight": strided("weight")},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("operator", CLASSES)
def test_every_class_is_drawn(operator):
    counts = dict.fromkeys(CLASSES[operator], 0)
    for seed in itertools.islice(seeds_of(operator), CALLS):
        call = draw(seed, "cpp")
        inputs = tensors(call)
        for name, holds in CLASSES[operator].items():
            counts[name] += any(holds(call, t) for t in inputs)
    assert not {name: count for name, count in counts.items() if count < 2}, counts


@pytest.mark.parametrize("kind", OUTSIDE)
def test_what_users_found_is_drawn(kind):
    seeds = (seed for seed in itertools.count() if ORDER[seed % len(ORDER)][1] == kind)
    calls = [draw(seed, "cpp") for seed in itertools.islice(seeds, 12)]
    assert sum(OUTSIDE[kind](call, tensors(call)[0]) for call in calls) >= 3


@pytest.mark.parametrize("mode", [*SAVED, *CHANGED])
def test_every_change_between_the_passes_is_drawn(mode):
    places = [place for place, (_, kind) in enumerate(ORDER) if kind.endswith(" saved")]
    seeds = (turn * len(ORDER) + place for turn in itertools.count() for place in places)
    assert mode in {draw(seed, "cpp").mode for seed in itertools.islice(seeds, 120)}


def test_a_seed_is_a_call():
    seeds = [*itertools.islice(seeds_of("mssa"), 5), *itertools.islice(seeds_of("tssa cache"), 5)]
    assert [draw(seed, "cpp").source() for seed in seeds] == [draw(seed, "cpp").source() for seed in seeds]
