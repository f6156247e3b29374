"""Forms of the published modules that can be patched, each with a forward that calls an operator.

Re-implementations use many names for one module, and the same parts can compute several functions: full and causal
attention, for example. So ``readings`` returns every form that the parts of a module allow, the likeliest first, and
the probes in ``probe.py`` find the one that the module computes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from crate_kernels._patch import masks
from crate_kernels._patch.shadow import shadow_of
from crate_kernels.nn import _heads
from crate_kernels.ops.ista import ista, ista_overcomplete
from crate_kernels.ops.mssa import mssa
from crate_kernels.ops.tssa import tssa

# Known names of each part.
PROJECTIONS = ("qkv", "c_attn", "to_qkv")
APART = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("to_q", "to_k", "to_v"))
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
TENSORS = frozenset((*TEMPS, "denom_bias", *(name for names in DICTIONARIES for name in names)))

PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_EMPTY = nn.Module()
_ORDINARY = "has projections of its own for query, key and value, where mssa has one: not white-box"
_SOFTMAX: dict[int | None, str] = {-1: "softmax", 3: "softmax", 1: "softmax over heads", -2: "softmax over heads"}
# Suffixes of the tensors from which pruning and weight normalisation compute the tensor before each call.
_COMPUTED_FROM = ("_orig", "_g", "_v")


@dataclass(frozen=True)
class Form:
    """One reading of a module: the role of each attribute.

    Attributes:
        kind: name that ``patch`` reports.
        op: the operator, as backends name it.
        tensors: parameters that the operator takes.
        numbers: attributes that the operator takes, read at each call.
        bypassed: children that the operator replaces, each with its ``label``.
        mask: the forward's mask argument, if there is one.
        assumed: other plain attributes, with their values at the time of the probe.
    """

    kind: str
    op: str
    tensors: tuple[str, ...]
    numbers: tuple[str, ...]
    bypassed: tuple[tuple[str, str], ...]
    mask: masks.Argument | None
    assumed: tuple[tuple[str, type, Any], ...]

    def assuming(self, module: nn.Module) -> Form:
        """Return the form with the present values of the attributes that are not read at each call."""
        read = {*self.live(), *vars(_EMPTY)}
        held = ((name, type(value), value) for name, value in vars(module).items() if name not in read)
        return replace(self, assumed=tuple(item for item in held if isinstance(item[2], PLAIN)))

    def live(self) -> set[str]:
        """Return the attributes that are read at each call."""
        return set(self.numbers)

    def parts(self) -> set[str]:
        """Return the parameters and children that the form accounts for; any other would be ignored silently."""
        return {*self.tensors, *(name for name, _ in self.bypassed)}

    def weight(self, module: nn.Module) -> Tensor:
        """Return a parameter with the module's dtype and device."""
        raise NotImplementedError

    def token_dim(self, module: nn.Module) -> int:
        """Return the width of the tokens."""
        raise NotImplementedError

    def ready(self, module: nn.Module, x: Tensor) -> bool:
        """Say if the operator equals the published forward now: all is as probed, bypassed children have no hooks."""
        if x.is_nested:
            return False
        if not all(number(module, name) for name in self.numbers):
            return False
        for name, kind, value in self.assumed:
            held = vars(module).get(name)
            if held is not value and (type(held) is not kind or held != value):
                return False
        for name, known in self.bypassed:
            child: Any = module._modules.get(name)
            if label(child) != known or (child is not None and any(getattr(child, hooks) for hooks in HOOKS)):
                return False
        return True

    def options(self, x: Tensor, mask: Any) -> dict[str, Any] | None:
        """Return the operator's options for the mask of a call; None if only the published forward can take it."""
        return {} if mask is None else None

    def run(self, module: Any, x: Tensor, backend: str | None, options: dict[str, Any]) -> Tensor:
        """Return the module's output; ``options`` are the operator's options for the mask of the call."""
        raise NotImplementedError


@dataclass(frozen=True)
class Attention(Form):
    """Attention with one projection.

    Attributes:
        projection: child that projects the tokens for the operator.
        heads: attribute with the number of heads.
        after: children through which the output goes.
        causal, phi: options of the operator.
        scale: attribute, or the number itself; None is head_dim ** -0.5.
        dropout: child, or attribute, with the dropout rate of the operator.
    """

    projection: str
    heads: str
    after: tuple[str, ...]
    causal: bool = False
    phi: str = "softmax"
    scale: str | float | None = None
    dropout: str | None = None

    def live(self) -> set[str]:
        return super().live() | {self.heads, self.dropout or ""}

    def parts(self) -> set[str]:
        return super().parts() | {self.projection, *self.after}

    def weight(self, module: nn.Module) -> Tensor:
        own = (*module.get_submodule(self.projection).parameters(), *module.parameters())
        return next(p for p in own if p.is_floating_point())

    def token_dim(self, module: nn.Module) -> int:
        return _linear_sizes(module._modules[self.projection])[1]

    def ready(self, module: nn.Module, x: Tensor) -> bool:
        # At a rate of 1 the published dropout gives zeros; the operators refuse that rate.
        return x.dim() == 3 and super().ready(module, x) and self.rate(module) < 1.0

    def options(self, x: Tensor, mask: Any) -> dict[str, Any] | None:
        return super().options(x, mask) if self.mask is None else self.mask.options(mask, x, self.causal)

    def rate(self, module: nn.Module) -> float:
        """Return the operator's dropout rate."""
        if self.dropout is None:
            return 0.0
        child: Any = module._modules.get(self.dropout)
        if child is None:
            return vars(module)[self.dropout] if module.training else 0.0
        return child.p if child.training else 0.0

    def run(self, module: Any, x: Tensor, backend: str | None, options: dict[str, Any]) -> Tensor:
        projection, heads = getattr(module, self.projection), getattr(module, self.heads)
        projected = projection(x)
        # The width of the whole: under tensor parallelism this process has a part.
        width = _linear_sizes(projection)[0] or projected.shape[-1]
        options = {"causal": self.causal, "backend": backend, **options}
        if self.op == "mssa":
            w = _heads.split_local("patch", projected, width // heads)
            options["dropout_p"] = _heads.check_dropout("patch", self.rate(module), w, heads)
            scale = getattr(module, self.scale) if isinstance(self.scale, str) else self.scale
            out = mssa(w, scale=scale, phi=self.phi, **options)
        else:
            w = _heads.split(_heads.whole("patch", projected, width, _heads.SOFTMAX_OVER_HEADS), heads)
            temp, *bias = (getattr(module, name) for name in self.tensors)
            out = tssa(w, temp, denom_bias=bias[0] if bias else None, dropout_p=self.rate(module), **options)
        out = _heads.merge(out)
        for name in self.after:
            out = getattr(module, name)(out)
        return out


@dataclass(frozen=True)
class Sparse(Form):
    """ISTA: plain for ``steps`` = 0, else overcomplete with ``steps`` steps, a number or an attribute's name.

    ``transposed``: the module keeps the transpose of the operator's dictionary.
    """

    transposed: bool
    steps: str | int

    def live(self) -> set[str]:
        return super().live() | {str(self.steps)}

    def weight(self, module: nn.Module) -> Tensor:
        weight = tensor(module, self.tensors[0])
        assert weight is not None
        return weight

    def token_dim(self, module: nn.Module) -> int:
        return self.weight(module).shape[1 if self.transposed else 0]

    def run(self, module: Any, x: Tensor, backend: str | None, options: dict[str, Any]) -> Tensor:
        step_size, lambd = (getattr(module, name) for name in self.numbers)
        weights = [getattr(module, name) for name in self.tensors]
        if self.transposed:
            weights = [weight.t() for weight in weights]
        if self.steps == 0:
            return ista(x, weights[0], step_size=step_size, lambd=lambd, backend=backend)
        steps = getattr(module, self.steps) if isinstance(self.steps, str) else self.steps
        return ista_overcomplete(x, *weights, step_size=step_size, lambd=lambd, steps=steps, backend=backend)


def label(child: Any) -> str:
    """Name the function of a child; "other" where no operator can replace it."""
    if child is None:
        return "nothing"
    if type(child) is nn.Softmax:
        return _SOFTMAX.get(child.dim, "other")
    return {nn.Dropout: "dropout", nn.Identity: "identity", nn.ReLU: "relu"}.get(type(child), "other")


def tensor(module: nn.Module, name: str) -> Tensor | None:
    """Return a parameter, a buffer, or the tensor that a parametrization or pruning computes under that name."""
    if is_parametrized(module, name):  # ask a shadow: a parametrization may count its calls
        with torch.no_grad():
            return getattr(shadow_of(module, lambda _, t: t.clone(), False, itertools.repeat(0.0)), name)
    value = module._parameters.get(name, module._buffers.get(name, vars(module).get(name)))
    return value if isinstance(value, Tensor) else None


def number(module: nn.Module, name: str) -> bool:
    """Say if an attribute is a plain number."""
    value = vars(module).get(name)
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def readings(module: nn.Module) -> tuple[list[Form], str | None]:
    """Return every form that a module's parts allow, likeliest first, or the reason why a look-alike has none.

    Return neither for a module that is not like a published one.
    """
    projection = next((name for name in PROJECTIONS if _linear_sizes(module._modules.get(name))[0]), None)
    forms, reason = _ista_forms(module) if projection is None else _attention_forms(module, projection)
    if not forms and reason is None:
        reason = _equal_projections(module._parameters.get("in_proj_weight"))
        apart = (all(_linear_sizes(module._modules.get(name))[0] for name in names) for names in APART)
        if reason is None and (isinstance(module, nn.MultiheadAttention) or any(apart)):
            reason = _ORDINARY
    misfits = [(form, _unexplained(module, form)) for form in forms]
    whole = [form for form, misfit in misfits if misfit is None]
    return whole, None if whole else next((misfit for _, misfit in misfits), reason)


def with_dropout(module: nn.Module, form: Form) -> Iterator[Form]:
    """Yield the form with each possible place of dropout, on the weights and on the output, likeliest first."""
    if not isinstance(form, Attention):
        yield form
        return
    children = [name for name in DROPOUTS if label(module._modules.get(name)) == "dropout"]
    rates = [name for name in DROPOUTS if number(module, name)]
    for dropout in (*children, *rates, None):
        for last in ((), *((name,) for name in children)):
            yield replace(form, dropout=dropout, after=form.after + last)


def _linear_sizes(child: Any) -> tuple[int, int]:
    """Return (out_features, in_features) of a linear child; zeros for any other."""
    sizes = getattr(child, "out_features", 0), getattr(child, "in_features", 0)
    return sizes if all(type(size) is int for size in sizes) else (0, 0)


def _unexplained(module: nn.Module, form: Form) -> str | None:
    """Name a part of the module that a form does not account for; None if there is none."""
    known = form.parts() | {"parametrizations"}
    known |= {name + suffix for name in form.tensors if name in vars(module) for suffix in _COMPUTED_FROM}
    held = {**module._parameters, **module._modules}
    extra = sorted(name for name, part in held.items() if part is not None and name not in known)
    numbers = {"mssa": SCALES, "ista": (*STEP_SIZES, *LAMBDAS)}.get(form.op, ())
    learned = [name for name in numbers if tensor(module, name) is not None]
    odd = [name for name, what in form.bypassed if what == "other"]
    if learned:
        return f"looks like {form.kind}, but its {learned[0]} is a tensor, and the operator takes a number"
    if extra:
        return f"looks like {form.kind}, but has more: {', '.join(extra)}"
    return f"looks like {form.kind}, but has another {', '.join(odd)}" if odd else None


def _attention_forms(module: nn.Module, projection: str) -> tuple[list[Form], str | None]:
    width, dim = _linear_sizes(module._modules[projection])
    after = tuple(name for name in AFTER if module._modules.get(name) is not None)
    taken = (_linear_sizes(part)[1] for name in after for part in module.get_submodule(name).modules())
    if width == 3 * next(filter(None, taken), dim):
        return [], _equal_projections(module.get_submodule(projection)._parameters.get("weight")) or _ORDINARY
    if dim == 0:
        return [], f"looks like mssa, but its {projection} has no width yet: patch after a first call"
    counts = {name: vars(module).get(name) for name in HEADS}
    heads = {name: n for name, n in counts.items() if type(n) is int and n > 0 and width % n == 0}
    if not heads:
        return [], f"looks like mssa, but has no number of heads ({', '.join(HEADS)}) that divides its {projection}"
    labels = {name: label(module._modules[name]) for name in (*ATTENDS, *DROPOUTS) if name in module._modules}
    mask = masks.argument(module)
    common = {"numbers": (), "mask": mask, "assumed": (), "projection": projection, "after": after}
    forms: list[Form] = []
    for name, n in heads.items():
        forms += _tssa_forms(module, n, labels, {**common, "heads": name})
        forms += _mssa_forms(module, labels, {**common, "heads": name})
    return forms, None


def _tssa_forms(module: nn.Module, heads: int, labels: dict[str, str], common: dict[str, Any]) -> Iterator[Attention]:
    bypassed = _bypassed(labels, ("softmax over heads",))
    temps = {name: tensor(module, name) for name in TEMPS}
    bias = tensor(module, "denom_bias")
    for name, temp in temps.items():
        if temp is None or tuple(temp.shape) not in ((heads,), (heads, 1)):
            continue
        if bias is None:
            yield Attention("tssa", "tssa", (name,), bypassed=bypassed, **common)
            yield Attention("causal tssa", "tssa", (name,), bypassed=bypassed, **common, causal=True)
        elif bias.shape[0] == heads:
            yield Attention("causal tssa", "tssa", (name, "denom_bias"), bypassed=bypassed, **common, causal=True)


def _mssa_forms(module: nn.Module, labels: dict[str, str], common: dict[str, Any]) -> Iterator[Attention]:
    plain = ("identity", "relu")
    phi = next((labels[name] for name in ATTENDS if labels.get(name) in plain), "softmax")
    bypassed = _bypassed(labels, ("softmax", *plain))
    scales = [name for name in SCALES if number(module, name)]
    for causal in (False, True):
        for scale in (*scales, None, 1.0):
            form = Attention("mssa", "mssa", (), bypassed=bypassed, **common, causal=causal, phi=phi, scale=scale)
            form = replace(form, numbers=(scale,)) if isinstance(scale, str) else form
            yield replace(form, kind="causal mssa") if causal else form


def _bypassed(labels: dict[str, str], attends: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return the children that an operator replaces, with "other" for a child whose function it does not have."""
    dropouts = ("dropout", "identity", "nothing")
    fits = {name: what in (attends if name in ATTENDS else dropouts) for name, what in labels.items()}
    return tuple((name, what if fits[name] else "other") for name, what in labels.items())


def _ista_forms(module: nn.Module) -> tuple[list[Form], str | None]:
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
    step_size = next((name for name in STEP_SIZES if number(module, name)), None)
    lambd = next((name for name in LAMBDAS if number(module, name)), None)
    if step_size is None or lambd is None:
        lacking = STEP_SIZES if step_size is None else LAMBDAS
        learned = next((name for name in lacking if tensor(module, name) is not None), None)
        if learned is not None:
            return [], f"looks like ista, but its {learned} is a tensor, and the operator takes a number"
        return [], f"looks like ista, but has no number {' or '.join(lacking)}"
    labels = {name: label(module._modules[name]) for name in RELUS if name in module._modules}
    common = {
        "numbers": (step_size, lambd),
        "bypassed": tuple((name, what if what == "relu" else "other") for name, what in labels.items()),
        "mask": None,
        "assumed": (),
    }
    steps: str | int = next((name for name in STEPS if type(vars(module).get(name)) is int), 2)
    forms: list[Form] = []
    for names, rows, columns in found:
        for transposed in (False, True):
            if len(names) == 1 and rows == columns:
                forms.append(Sparse("ista", "ista", names, **common, transposed=transposed, steps=0))
            forms.append(Sparse("ista_overcomplete", "ista", names, **common, transposed=transposed, steps=steps))
    return forms, None


def _equal_projections(weight: Any) -> str | None:
    """Return why attention with three equal projections, as in CLIPA's checkpoints, is not replaced."""
    if type(weight) not in (Tensor, nn.Parameter) or weight.is_meta or weight.shape[0] % 3:
        return None
    query, key, value = weight.detach().chunk(3)
    if not (torch.equal(query, key) and torch.equal(key, value)):
        return None
    return "computes mssa as long as its three projections are equal, which training would part; see from_official"
