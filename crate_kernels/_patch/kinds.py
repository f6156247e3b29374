"""Readings of a module: which forms its parts allow.

Re-implementations use many names for one module, and the same parts can compute several functions: full and causal
attention, for example. So ``readings`` returns every form that the parts of a module allow, the likeliest first, and
the probes in ``probe.py`` find the one that the module computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from crate_kernels._patch import masks
from crate_kernels._patch.forms import AttentionForm, ModuleForm, SparseForm, label, linear_sizes, number, tensor

# Known names of each part.
PROJECTIONS = ("qkv", "c_attn", "to_qkv")
THREE_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("to_q", "to_k", "to_v"))
HEADS = ("heads", "num_heads", "n_head", "n_heads", "nheads")
SCALES = ("scale", "scaling", "softmax_scale")
ATTENDS = ("attend", "softmax")
DROPOUTS = ("dropout", "attn_drop", "attn_dropout")
AFTER = ("y_hook", "to_out", "c_proj", "proj", "out_proj", "resid_dropout", "proj_drop")  # in the order of a forward
TEMPS = ("temp", "temperature")
DICTIONARIES = (("D", "D1"), ("c_fc", "c_proj"), ("weight",), ("D",))
STEP_SIZES = ("step_size", "eta")
LAMBDAS = ("lambd", "lmbda", "lambda_", "lam")
STEPS = ("steps", "num_steps", "n_steps")
RELUS = ("relu", "act", "activation")
TENSORS = frozenset((*TEMPS, *STEP_SIZES, *LAMBDAS, "denom_bias", *(name for names in DICTIONARIES for name in names)))

_ORDINARY = "has projections of its own for query, key and value, where mssa has one: not white-box"
# Suffixes of the tensors from which pruning and weight normalisation compute the tensor before each call.
_COMPUTED_FROM = ("_orig", "_g", "_v")


def readings(module: nn.Module) -> tuple[list[ModuleForm], str | None]:
    """Return every form that a module's parts allow, likeliest first, or the reason why a look-alike has none.

    Return neither for a module that is not like a published one.
    """
    projection = next((name for name in PROJECTIONS if linear_sizes(module._modules.get(name))[0]), None)
    forms, reason = _ista_forms(module) if projection is None else _attention_forms(module, projection)
    if not forms and reason is None:
        reason = _equal_projections(module._parameters.get("in_proj_weight"))
        three = (all(linear_sizes(module._modules.get(name))[0] for name in names) for names in THREE_PROJECTIONS)
        if reason is None and (isinstance(module, nn.MultiheadAttention) or any(three)):
            reason = _ORDINARY
    misfits = [(form, _unexplained(module, form)) for form in forms]
    whole = [form for form, misfit in misfits if misfit is None]
    if projection is None or not isinstance(module._modules[projection], nn.Conv2d):
        whole += [replace(form, maps=True, mask=None) for form in whole]  # which flattens maps itself
    return whole, None if whole else next((misfit for _, misfit in misfits), reason)


def with_dropout(module: nn.Module, form: ModuleForm) -> Iterator[ModuleForm]:
    """Yield the form with each possible place of dropout, on the weights and on the output, likeliest first."""
    if not isinstance(form, AttentionForm):
        yield form
        return
    children = [name for name in DROPOUTS if label(module._modules.get(name)) == "dropout"]
    rates = [name for name in DROPOUTS if number(module, name)]
    for dropout in (*children, *rates, None):
        for last in ((), *((name,) for name in children)):
            yield replace(form, dropout=dropout, after=form.after + last)


def _unexplained(module: nn.Module, form: ModuleForm) -> str | None:
    """Name a part of the module that a form does not account for; None if there is none."""
    known = form.parts() | {"parametrizations"}
    known |= {name + suffix for name in form.tensors if name in vars(module) for suffix in _COMPUTED_FROM}
    parts = {**module._parameters, **module._modules}
    extra = sorted(name for name, part in parts.items() if part is not None and name not in known)
    numbers = {"mssa": SCALES, "ista": (*STEP_SIZES, *LAMBDAS)}.get(form.op, ())
    learned = [name for name in numbers if tensor(module, name) is not None and name not in known]
    odd = [name for name, what in form.bypassed if what == "other"]
    if learned:
        return f"looks like {form.kind}, but its {learned[0]} is a tensor, and the operator takes a number"
    if extra:
        return f"looks like {form.kind}, but has more: {', '.join(extra)}"
    return f"looks like {form.kind}, but has another {', '.join(odd)}" if odd else None


def _attention_forms(module: nn.Module, projection: str) -> tuple[list[ModuleForm], str | None]:
    width, dim = linear_sizes(module._modules[projection])
    after = tuple(name for name in AFTER if module._modules.get(name) is not None)
    inputs = (linear_sizes(part)[1] for name in after for part in module.get_submodule(name).modules())
    if width == 3 * next(filter(None, inputs), dim):  # of the output projection
        return [], _equal_projections(module.get_submodule(projection)._parameters.get("weight")) or _ORDINARY
    if dim == 0:
        return [], f"looks like mssa, but its {projection} has no width yet: patch after a first call"
    counts = {name: vars(module).get(name) for name in HEADS}
    heads = {name: n for name, n in counts.items() if type(n) is int and n > 0 and width % n == 0}
    if not heads:
        return [], f"looks like mssa, but has no number of heads ({', '.join(HEADS)}) that divides its {projection}"
    labels = {name: label(module._modules[name]) for name in (*ATTENDS, *DROPOUTS) if name in module._modules}
    mask = masks.argument(module)
    maps = isinstance(module._modules[projection], nn.Conv2d)
    mask = None if maps else mask
    common = {"numbers": (), "mask": mask, "assumed": (), "maps": maps, "projection": projection, "after": after}
    forms: list[ModuleForm] = []
    for name, n in heads.items():
        forms += _tssa_forms(module, n, labels, {**common, "heads": name})
        forms += _mssa_forms(module, labels, {**common, "heads": name})
    return forms, None


def _tssa_forms(
    module: nn.Module, heads: int, labels: dict[str, str], common: dict[str, Any]
) -> Iterator[AttentionForm]:
    bypassed = _bypassed(labels, ("softmax over heads",))
    temps = {name: tensor(module, name) for name in TEMPS}
    bias = tensor(module, "denom_bias")
    for name, temp in temps.items():
        if temp is None or tuple(temp.shape) not in ((heads,), (heads, 1)):
            continue
        if bias is None:
            yield AttentionForm("tssa", "tssa", (name,), bypassed=bypassed, **common)
            yield AttentionForm("causal tssa", "tssa", (name,), bypassed=bypassed, **common, causal=True)
        elif bias.shape[0] == heads:
            yield AttentionForm("causal tssa", "tssa", (name, "denom_bias"), bypassed=bypassed, **common, causal=True)


def _mssa_forms(module: nn.Module, labels: dict[str, str], common: dict[str, Any]) -> Iterator[AttentionForm]:
    plain = ("identity", "relu")
    phi = next((labels[name] for name in ATTENDS if labels.get(name) in plain), "softmax")
    bypassed = _bypassed(labels, ("softmax", *plain))
    scales = [name for name in SCALES if number(module, name)]
    for causal in (False, True):
        for scale in (*scales, None, 1.0):
            form = AttentionForm("mssa", "mssa", (), bypassed=bypassed, **common, causal=causal, phi=phi, scale=scale)
            form = replace(form, numbers=(scale,)) if isinstance(scale, str) else form
            yield replace(form, kind="causal mssa") if causal else form


def _bypassed(labels: dict[str, str], attends: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return the children that an operator replaces, with "other" for a child whose function it does not have."""
    dropouts = ("dropout", "identity", "nothing")
    fits = {name: what in (attends if name in ATTENDS else dropouts) for name, what in labels.items()}
    return tuple((name, what if fits[name] else "other") for name, what in labels.items())


def _ista_forms(module: nn.Module) -> tuple[list[ModuleForm], str | None]:
    both = (*STEP_SIZES, *LAMBDAS)
    if not any(number(module, name) or tensor(module, name) is not None for name in both):
        return [], None
    found = []
    for names in DICTIONARIES:
        weights = [tensor(module, name) for name in names]
        shapes = {weight.shape if weight is not None else () for weight in weights}
        if len(shapes) == 1 and len(shape := shapes.pop()) == 2:
            found.append((names, *shape))
    if not found:
        return [], None
    present = [
        [n for n in names if number(module, n) or tensor(module, n) is not None] for names in (STEP_SIZES, LAMBDAS)
    ]
    if not all(present):
        lacking = LAMBDAS if present[0] else STEP_SIZES
        return [], f"looks like ista, but has no number {' or '.join(lacking)}"
    terms = present[0][0], present[1][0]
    labels = {name: label(module._modules[name]) for name in RELUS if name in module._modules}
    common = {
        "numbers": tuple(name for name in terms if number(module, name)),
        "step": terms,
        "bypassed": tuple((name, what if what == "relu" else "other") for name, what in labels.items()),
        "mask": None,
        "assumed": (),
        "maps": False,
    }
    steps: str | int = next((name for name in STEPS if type(vars(module).get(name)) is int), 2)
    forms: list[ModuleForm] = []
    for names, rows, columns in found:
        for transposed in (False, True):
            if len(names) == 1 and rows == columns:
                forms.append(SparseForm("ista", "ista", names, **common, transposed=transposed, steps=0))
            forms.append(SparseForm("ista_overcomplete", "ista", names, **common, transposed=transposed, steps=steps))
    return forms, None


def _equal_projections(weight: Any) -> str | None:
    """Return why attention with three equal projections, as in CLIPA's checkpoints, is not replaced."""
    if type(weight) not in (Tensor, nn.Parameter) or weight.is_meta or weight.shape[0] % 3:
        return None
    query, key, value = weight.detach().chunk(3)
    if not (torch.equal(query, key) and torch.equal(key, value)):
        return None
    return "computes mssa as long as its three projections are equal, which training would part; see from_official"
