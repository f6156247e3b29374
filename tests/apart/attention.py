"""What drawn calls of mssa and tssa share: sizes, packings, upstream gradients, and what is done around a call."""

import torch

from tests.apart import values
from tests.apart.call import HOPPER, KERNELS, has_cpp

MODES = (
    "no_grad", "inference", "add", "double", "part", "second", "twice", "overwritten", "threads", "prefix",
    "grad of grad",
)  # fmt: skip
# What a hook makes of a tensor that autograd saves for the backward, and whether the backward may then be refused.
SAVED = {
    "saved as it was": ("t.clone()", False),
    "saved in other memory": ("t.mT.contiguous().mT if t.ndim > 1 else t.clone()", True),
    "saved in another dtype": ("t.to(another(t)) if t.is_floating_point() else t", True),
    "saved in part": ("t[..., :-1] if t.ndim else t", True),
    "saved in one dimension": ("t.flatten()", True),
    "saved without its memory": ("t.to('meta')", True),
}
# What becomes of the data of a tensor between forward and backward, likewise.
CHANGED = {
    "data in other memory": ("t.clone()", False),
    "data in part": ("t[..., :1].clone()", True),
    "data gone": ("t.new_empty(0)", True),
}
ANOTHER = "another = lambda t: torch.float32 if t.dtype == torch.bfloat16 else torch.bfloat16"
MAY_REFUSE = [name for name, (_, refused) in (SAVED | CHANGED).items() if refused]
IN_PLACE = ("add", "double", "part", "second")  # an output is changed before the backward
# Most multiply-adds per product, mostly and now and then: a call and its equations then take some milliseconds.
LIMITS = {"triton": (20_000, 60_000), "emulated": (100_000, 400_000)}
_CPU_LIMITS = (400_000, 4_000_000)


def sizes(d, backend, quadratic):
    """Return (batch, nheads, seqlen, head_dim), small enough in all."""
    if backend in HOPPER:  # few shapes of heads, each of which is a kernel
        return d.pick(1, 1, 2), d.pick(1, 2), d.pick(50, 197, 208, 257, 300, 333, 390), d.pick(64, 64, 64, 40, 128)
    batch, nheads, seqlen, head_dim = d.pick(1, 1, 2, 3, 5), d.pick(1, 1, 2, 3, 4, 6, 8, 12), d.length(), d.channels()
    if backend == "triton":
        seqlen, nheads = min(seqlen, 70), min(nheads, 3)
    small, large = LIMITS.get(backend, _CPU_LIMITS)
    limit = d.pick(small, small, small, large)
    while batch * nheads * seqlen * head_dim * (seqlen if quadratic else 16) > limit:
        if batch > 1:
            batch -= 1
        elif nheads > 2:
            nheads -= 1
        elif head_dim > seqlen:
            head_dim = head_dim * 3 // 4
        elif nheads > 1 and d.chance(0.5):
            nheads = 1
        else:
            seqlen = seqlen * 3 // 4
    if d.chance(0.02):
        return d.pick((0, nheads, seqlen, head_dim), (batch, nheads, 0, head_dim))
    return batch, nheads, seqlen, head_dim


def packed_tokens(d, kind, shape, scale):
    """Write packed tokens; return (total, nheads, head_dim), the offsets and a max_seqlen."""
    _, nheads, seqlen, head_dim = shape
    offsets, longest = values.packing(d, max(seqlen, 1))
    total = offsets[-1]
    values.tokens(d, kind, (1, nheads, max(total, 1), head_dim), scale)
    one = d.integer(0, len(offsets) - 2)
    values.undefined(d, f":, :, {offsets[one]}:{offsets[one + 1]}", len(offsets) - 1)
    d.put(f"w = w[0, :, :{total}].transpose(0, 1)")
    return (total, nheads, head_dim), offsets, longest


def modes(d, call, kind, units=0, prefix=False):
    """Choose what is done around the call.

    ``units`` is how many threads have something to do; ``prefix``: whether earlier tokens do not see later
    ones.
    """
    if kind == "saved":
        saved(d, call)
        return
    mode = d.pick(*MODES) if kind == "modes" or d.chance(0.06) else ""
    grad = mode not in ("no_grad", "inference")
    if (
        (mode in ("add", "double", "part") and "out" not in call.upstream)
        or (mode == "second" and len(call.outputs) == 1)
        or (mode == "grad of grad" and call.backend == "reference")  # has one, which transforms.py judges
        or (mode == "prefix" and not (prefix and call.backend in KERNELS))
        or (not grad and call.context)
    ):
        return
    if not grad:
        call.context = {"no_grad": "torch.no_grad()", "inference": "torch.inference_mode()"}[mode]
        call.upstream = {}
    if mode == "threads":
        count = d.integer(2, 4)
        d.put(f"torch.set_num_threads({count})")
        call.same_bits = call.backend == "cpp" and units >= count
    call.mode = mode


def saved(d, call):
    """Let what autograd saves change between the passes, by a hook or by its owner.

    PyTorch's own operators broadcast what they are handed; of these calls none but ours is judged.
    """
    native = call.op == "mssa" and (call.backend == "composite" or (call.backend is None and call.dtype == "float64"))
    if call.backend == "reference" or native or not has_cpp():
        return
    call.mode = d.pick(*CHANGED) if call.context else d.pick(*SAVED, *CHANGED)
    d.put(ANOTHER)
    if call.mode in SAVED:
        call.context = hooks(call.mode)


def hooks(mode):
    """Return the context in which autograd saves tensors as a mode of ``SAVED`` has it."""
    return f"torch.autograd.graph.saved_tensors_hooks(lambda t: {SAVED[mode][0]}, lambda t: t)"


def upstreams(d, outputs, shapes, dtypes, kind=""):
    """Write upstream gradients of some outputs: the first, the second or both; that of the first of one kind."""
    which = outputs if len(outputs) == 1 else d.pick(outputs, outputs, outputs[:1], outputs[1:])
    which = outputs if kind == "ones" and which == outputs[1:] else which
    for name in which:
        values.upstream(d, f"d{name}", shapes[name], dtypes[name], kind=kind if name == "out" else "")
    return {name: f"d{name}" for name in which}


def merges(backend, laid, dtype):
    """Whether the output's heads must merge without a copy: kernels always, plain PyTorch where the input's do."""
    kernel = backend in ("cpp", "emulated", *HOPPER) or (backend is None and dtype != "float64" and has_cpp())
    return kernel or (backend != "reference" and laid == "projection")


def sdpa_factor(shape, dtype, p):
    """Return the factors that PyTorch's own attention draws from its generator for weights of this shape."""
    ones = torch.ones(*shape[:3], shape[2], dtype=getattr(torch, dtype))
    return torch.nn.functional.dropout(ones, p).double()
