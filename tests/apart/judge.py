"""The verdict on one call: its errors against float64, and what it must leave as it was."""

import math
import re
import statistics
import time
from dataclasses import dataclass, replace

import pytest
import torch

from tests.apart import oracle, philox
from tests.apart.attention import CHANGED, IN_PLACE, MAY_REFUSE
from tests.apart.call import HEAD, HOPPER
from tests.apart.tolerance import FORWARD, GRADIENT, ToleranceChecker, Wrong, check, error, same

REDRAWN = 15
MAX_RATIO = 3.0  # tolerances that no luck explains
LSE_ON_HOPPER = {"bfloat16": 2.7e-6, "float16": 6.7e-7}  # error that docs/numerics.md states


class Refused(Exception):
    """A documented refusal."""


@dataclass
class Verdict:
    """What came of a call.

    Attributes:
        status: "passed", "close" (over its tolerance but for eager's luck, with these numbers or with most others),
            "refused" (as documented), "limit" (over its tolerance, as documented), "failed", or "broken"
            (the fuzzer itself).
        why: the largest error or what was wrong.
        ratio: the largest error as a share of its tolerance.
        seconds: what it took.
    """

    status: str
    why: str = ""
    ratio: float = 0.0
    seconds: float = 0.0


def judge(call):
    """Make the call and return the verdict."""
    start, threads = time.perf_counter(), torch.get_num_threads()
    try:
        verdict = _judge(call)
    except Wrong as wrong:
        status = "limit" if within_limit(call, str(wrong)) else "close" if by_luck(call, wrong) else "failed"
        verdict = Verdict(status, str(wrong), wrong.ratio)
    except Refused as refused:
        verdict = Verdict("refused", str(refused))
    except Exception as error:
        verdict = Verdict("broken", f"{type(error).__name__}: {error}")
    torch.set_num_threads(threads)
    verdict.seconds = time.perf_counter() - start
    return verdict


def by_luck(call, wrong):
    """Whether most calls with other numbers are within tolerance: a kernel that is wrong is so with most."""
    if not 1.0 < wrong.ratio <= MAX_RATIO:
        return False
    return statistics.median(share(redrawn(call, turn)) for turn in range(1, REDRAWN + 1)) <= 1.0


def redrawn(call, turn):
    """Return the call with other numbers in its tensors; all else is as it was drawn."""
    seed = call.seed + 10**9 * turn
    first, *rest = call.setup
    return replace(call, seed=seed, setup=[first.replace(str(call.seed), str(seed)), *rest])


def share(call):
    """Return the largest error of a call as a share of its tolerance; infinite if something else is wrong with it."""
    try:
        return _judge(call).ratio
    except Wrong as wrong:
        return wrong.ratio or math.inf


def within_limit(call, why):
    """Whether a result of mssa errs as docs/numerics.md says at most.

    That is, of a gradient on composite, rounding times the largest score; on cpp, of float32 tokens whose gradients are
    all one, less than PyTorch's attention; of lse on kernels for Hopper GPUs, another number.
    """
    lse = re.search(r"\blse: error ([-+.\de]+)", why)
    if lse is not None and call.op == "mssa" and call.backend in HOPPER:
        return float(lse[1]) <= LSE_ON_HOPPER.get(call.working or call.dtype, 0.0)
    composite = call.backend == "composite" or (call.backend is None and call.dtype == "float64")
    of_ones = call.kind == "mssa ones" and call.dtype == "float32" and call.backend in ("cpp", None)
    found = re.search(r"\bdw: error ([-+.\de]+), eager's [-+.\de]+, largest ([-+.\de]+)", why)
    if call.op != "mssa" or not (composite or of_ones) or found is None:
        return False
    space = {}
    exec("\n".join([*HEAD, *call.setup]), space)
    wrong, plain = float(found[1]), "dropout" not in call.line
    if of_ones:  # PyTorch's fast attention, which takes channels side by side
        space["w"] = space["w"].detach().contiguous()
        return plain and wrong <= error_of_pytorch(call, space)
    w, scale = space["w"].detach(), re.search(r"\bscale=([-+.\de]+)", call.line)
    height = float(w.double().square().sum(-1).max()) * abs(float(scale[1]) if scale else w.shape[-1] ** -0.5)
    if wrong <= 4 * torch.finfo(w.dtype).eps * height * float(found[2]):
        return True
    return plain and wrong <= GRADIENT * error_of_pytorch(call, space)


def error_of_pytorch(call, space):
    """Return the error of the gradient of w that PyTorch's own attention makes of this call: composite is that."""
    tensors = {name: value.detach() for name, value in space.items() if isinstance(value, torch.Tensor)}

    equation = oracle.attend

    def attend(queries, w, allowed, *, scale, **_):
        some = allowed.any(-1, keepdim=True)
        out = torch.nn.functional.scaled_dot_product_attention(queries, w, w, allowed | ~some, scale=scale)
        return out.masked_fill(~some, 0.0), equation(queries, w, allowed, scale=scale)[1]

    with pytest.MonkeyPatch.context() as patch:
        exact = equations(call, tensors, 0, torch.float64, 0.0, "")["dw"]
        patch.setattr(oracle, "attend", attend)
        found = equations(call, tensors, 0, None, 0.0, "")["dw"]
    return error(found, exact, exact.isfinite())


def _judge(call):
    space = {}
    exec("\n".join([*HEAD, *call.setup]), space)
    if call.check:
        return call.check(call, space)
    tensors = {name: value for name, value in space.items() if isinstance(value, torch.Tensor)}
    before = {name: value.detach().clone() for name, value in tensors.items()}
    seeded(call)
    seed = philox.next_seed()
    try:
        got = run(call, space)
    except Wrong:
        raise
    except Exception as error:
        documented(call, error)
    if call.refusal:
        raise Wrong(f"must be refused with {call.refusal[0].__name__}")
    for name, value in before.items():
        check(same(tensors[name].detach(), value), f"{name} was written to")
    layouts(call, tensors, got)
    again = run(call, space)
    for name, value in got.items():
        check(same(value, again[name]), f"{name} has other bits when the call is repeated")
    if call.mode == "prefix" and separate(tensors["w"]):
        later_tokens(call, space, got)
    if call.same_bits:
        torch.set_num_threads(1)
        for name, value in run(call, space).items():
            check(same(value, got[name]), f"{name} has other bits on one thread")
    seeded(call)
    state = torch.get_rng_state()

    def evaluate(tensors, cast, nudge, context):
        torch.set_rng_state(state)
        return equations(call, tensors, seed, cast, nudge, call.context if context and call.working else "")

    checker = ToleranceChecker(evaluate, before, call.working or call.dtype, call.lenient, call.jumps)
    # Where float64 has no number for an output, as with a bias of -inf in every head, its gradient has none either.
    finite = not any(value.isfinite().logical_not().any() for name, value in before.items() if name in ("w", "x"))
    defined = not finite or not any(checker.exact()[name].isnan().any() for name in call.outputs)
    for name, value in got.items():
        gradient = name.startswith("d")
        if defined or not gradient:
            checker.check_against(name, value, GRADIENT if gradient or call.kind.endswith("transforms") else FORWARD)
    return finished(checker)


def finished(checker):
    """Return the verdict of a call whose results have all been compared with the tolerance."""
    checker.raise_if_over()
    return Verdict("close" if checker.close else "passed", checker.why, checker.worst)


def documented(call, error):
    """Raise ``Refused`` if a call raised the error that it must, ``Wrong`` if it raised another."""
    text = f"{type(error).__name__}: {error}"
    if call.refusal and type(error) is call.refusal[0] and call.refusal[1] in str(error):
        raise Refused(text) from error
    if isinstance(error, RuntimeError) and ("is unavailable" in text or f"backend={call.backend!r} takes cuda" in text):
        raise Refused("unavailable: " + text) from error
    raise Wrong(text.splitlines()[0]) from error


def seeded(call):
    """Seed the CPU's generator; torch.manual_seed does so for every device, and takes longer than a small call."""
    torch.default_generator.manual_seed(call.seed)


def run(call, space):
    """Make the call; return outputs and gradients by name."""
    seeded(call)
    exec(call.call_line(), space)
    call.last = {"out": space["out"]}
    got = {name: space[name].detach().clone() for name in call.outputs}
    if call.mode in ("no_grad", "inference"):
        check(
            not any(space[name].requires_grad for name in call.outputs),
            "an output requires a gradient without grad mode",
        )
    if call.mode in IN_PLACE:
        exec(call.statements_after_the_call(), space)
    if call.upstream and call.wrt:
        got.update(gradients(call, space))
    return got


def gradients(call, space):
    """Differentiate as the call's mode has it.

    What was changed in place may be what a backward reads: then it must be refused, as it is where PyTorch's own
    operators save their output. A backward that did not need it must be right. What autograd saved may be of another
    dtype or shape by then: that is refused too, by whatever error, or the backward is right nevertheless.
    """
    names = [f"d{name}" for name in call.wrt]
    outputs, leaves, upstreams = (
        [space[name] for name in group] for group in (call.upstream, call.wrt, call.upstream.values())
    )
    overwritten = call.mode == "overwritten" and separate(leaves[0])
    kept = leaves[0].detach().clone()
    if overwritten:
        with torch.no_grad():
            leaves[0].mul_(3)
    changed = leaves[call.seed % len(leaves)]
    before_change = changed.data
    if call.mode in CHANGED:
        changed.data = eval(CHANGED[call.mode][0], space, {"t": before_change})
    try:
        found = torch.autograd.grad(
            outputs, leaves, upstreams, retain_graph=call.mode == "twice", create_graph=call.mode == "grad of grad"
        )
    except Exception as error:
        if call.mode in MAY_REFUSE:
            return {}
        if not isinstance(error, RuntimeError):
            raise
        read = overwritten or call.mode == "second" or (call.mode in IN_PLACE and call.op in ("mssa", "ista"))
        check(read and re.search("(chang|modifi)ed.* in[- ]?place", str(error)), str(error))
        return {}
    finally:
        if overwritten:
            with torch.no_grad():
                leaves[0].copy_(kept)
        if call.mode in CHANGED:
            changed.data = before_change
    if call.mode == "twice":
        for name, one, two in zip(names, found, torch.autograd.grad(outputs, leaves, upstreams), strict=True):
            check(same(one, two), f"{name} has other bits when the backward is repeated")
    if call.mode == "grad of grad":
        no_second_gradient(found, leaves)
        found = [gradient.detach() for gradient in found]
    return dict(zip(names, found, strict=True))


def no_second_gradient(found, leaves):
    """Check that gradients of gradients are refused by an error that says what has them."""
    try:
        torch.autograd.grad([gradient.sum() for gradient in found], leaves)
    except NotImplementedError as error:
        check("use backend='reference'" in str(error), str(error))
        return
    raise Wrong("a gradient of a gradient must be refused")


def later_tokens(call, space, got):
    """Check that no bit of an output depends on later tokens."""
    w = space["w"]
    kept, half = w.detach().clone(), w.shape[2] // 2
    with torch.no_grad():
        w[:, :, half:].mul_(-3).add_(1)
    try:
        changed = run(call, space)
    finally:
        with torch.no_grad():
            w.copy_(kept)
    for name in call.outputs:
        check(same(changed[name][:, :, :half], got[name][:, :, :half]), f"{name} depends on later tokens")


def layouts(call, tensors, got):
    """Check dtypes, shapes and memory of gradients and outputs; ``got`` holds contiguous copies of outputs."""
    out = call.last["out"]
    if call.merged and call.mode not in IN_PLACE:
        merged = out.transpose(1, 2).flatten(2)
        check(
            merged.untyped_storage().data_ptr() == out.untyped_storage().data_ptr(),
            "out.transpose(1, 2).flatten(2) copies",
        )
    owners = {value.untyped_storage().data_ptr(): name for name, value in tensors.items() if value.numel()}
    for name, value in (("out", out), *((f"d{name}", got.get(f"d{name}")) for name in call.wrt)):
        if value is not None and value.numel():
            other = owners.get(value.untyped_storage().data_ptr())
            check(other in (None, *call.upstream.values()), f"{name} shares memory with {other}")
            check(separate(value), f"{name} overlaps itself: strides {value.stride()}")
    for name in call.wrt:
        gradient, leaf = got.get(f"d{name}"), tensors[name]
        if gradient is not None:
            fits = gradient.shape == leaf.shape and gradient.dtype == leaf.dtype
            check(fits, f"d{name} is {gradient.dtype} {tuple(gradient.shape)}")


def separate(tensor):
    """Whether no two elements share memory."""
    if tensor.numel() == 0:
        return True
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return False
            reach += stride * (size - 1)
    return True


def through_changes(call, name, gradient):
    """Return the gradient of output ``name`` from that of what statements_after_the_call() made of it."""
    if (call.mode, name) in (("double", "out"), ("second", call.outputs[-1])):
        return gradient * 2.0
    if (call.mode, name) == ("part", "out"):
        return torch.cat([torch.zeros_like(gradient[..., :1]), gradient[..., 1:]], -1)
    return gradient


def equations(call, tensors, seed, cast, nudge, context):
    """Evaluate the call's equations with autograd, in float64, in float32 or (None) in the dtypes of its tensors."""
    t = {"seed": seed}
    for name, value in tensors.items():
        value = value.to(cast) if cast is not None and value.is_floating_point() else value
        t[name] = value.clone().requires_grad_() if name in call.wrt else value
    space = {"torch": torch, "compute": lambda: call.equation(t, nudge)}
    exec(f"with {context}:\n    result = compute()" if context else "result = compute()", space)
    result = {name: value for name, value in space["result"].items() if name in call.outputs}
    values = {name: value.detach() for name, value in result.items()}
    if call.upstream and call.wrt:
        inputs = [through_changes(call, name, t[f"d{name}"].to(result[name].dtype)) for name in call.upstream]
        grads = torch.autograd.grad([result[name] for name in call.upstream], [t[name] for name in call.wrt], inputs)
        values.update({f"d{name}": grad for name, grad in zip(call.wrt, grads, strict=True)})
    return values
