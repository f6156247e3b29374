"""Calls of every operator's launchers on small and odd sizes: no list of kernels is kept by hand.

Every pair of an operator's two main sizes is there; what else a call takes is drawn for it, the same on every machine.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from tests.ops.ista import aot as ista
from tests.ops.mssa import aot as mssa
from tests.ops.tssa import aot as tssa

HEADS = (1, 2, 3, 5, 8, 12, 33, 64)
CHANNELS = (1, 2, 3, 4, 8, 16, 24, 48, 64, 100, 256)  # of a head of tssa, all of whose heads are in one tile
HEAD_DIMS = (1, 2, 7, 15, 16, 17, 24, 31, 32, 33, 40, 48, 63, 64, 65, 72, 88, 96, 104, 128, 129, 160, 200, 255, 256)
LENGTHS = (1, 2, 3, 17, 33, 64, 197, 2100)  # the last is long for every launch table
DIMS = (1, 2, 3, 8, 16, 17, 48, 64, 100, 256)  # of ista's tokens, and the sizes of dictionaries
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BATCHES = (1, 300)  # fewer sequences than a device runs programs, and more

_LAYOUTS = ({}, {"padded": True}, {"packed": True})
_DROPOUT = ({}, {"dropout_p": 0.1})
_PADDED, _CAUSAL = _LAYOUTS[:2], ({}, {"causal": True})
_WEIGHTS = (*_DROPOUT, {"threshold": 0.1}, {"scale": -0.125}, {"scale": 2.0**-10})
_GRADIENTS = ({}, {"dlse": True}, {"dlse": True, "dout": False})
_NONNEGATIVE = ({}, {"nonnegative": False})
_ISTA_DTYPES = (*({"dtype": dtype} for dtype in DTYPES), {"dtype": torch.float32, "compute": torch.bfloat16})


@dataclass(frozen=True)
class SizedForm:
    """A form of an operator: ``crossed`` sizes are taken in all pairs, for each of which the rest is drawn.

    Attributes:
        make: returns a call of the launchers on meta tensors.
        crossed: values by argument.
        drawn: values by argument.
        options: tuples of keyword arguments, one of each is drawn.
    """

    make: Callable[..., Callable[[], object]]
    crossed: dict[str, tuple]
    drawn: dict[str, tuple]
    options: tuple[tuple[dict, ...], ...] = ()


def _per_length(crossed: dict[str, tuple], *options: tuple[dict, ...], **drawn: tuple):
    return {"crossed": crossed, "drawn": {"seqlen": LENGTHS, "dtype": DTYPES, **drawn}, "options": options}


_TSSA, _MSSA = {"nheads": HEADS, "head_dim": CHANNELS}, {"head_dim": HEAD_DIMS, "seqlen": LENGTHS}
_BLOCKS = {"crossed": {"backward": (False, True), "head_dim": HEAD_DIMS}, "options": (_PADDED, _CAUSAL, _DROPOUT)}
_TOKENS = {"tokens": LENGTHS, "dim": DIMS}
FORMS = {
    "tssa.full": SizedForm(tssa.full, **_per_length(_TSSA, _LAYOUTS, _DROPOUT, batch=BATCHES)),
    "tssa.causal": SizedForm(tssa.causal, **_per_length(_TSSA, _LAYOUTS, _DROPOUT, batch=BATCHES, bias=(False, True))),
    "tssa.decode": SizedForm(tssa.decode, _TSSA, {"new": LENGTHS, "dtype": DTYPES}, (_PADDED,)),
    "mssa.forward": SizedForm(mssa.forward, _MSSA, {"dtype": DTYPES}, (_LAYOUTS, _CAUSAL, _WEIGHTS)),
    "mssa.backward": SizedForm(mssa.backward, _MSSA, {"dtype": DTYPES}, (_LAYOUTS, _CAUSAL, _WEIGHTS, _GRADIENTS)),
    "mssa.decode": SizedForm(mssa.decode, {"head_dim": HEAD_DIMS, "new": LENGTHS[1::2]}, {"dtype": DTYPES}, (_PADDED,)),
    "mssa.between": SizedForm(mssa.between, drawn={"seqlen": LENGTHS, "dtype": DTYPES}, **_BLOCKS),
    "ista.step": SizedForm(ista.step, _TOKENS, {}, (_ISTA_DTYPES, _NONNEGATIVE)),
    "ista.streamed": SizedForm(ista.streamed, {"tokens": LENGTHS, "dim": (8, 16, 48, 64, 256)}, {}, (_NONNEGATIVE,)),
    "ista.overcomplete": SizedForm(
        ista.overcomplete, {"dim": DIMS, "hidden": DIMS}, {"tokens": LENGTHS, "dtype": DTYPES}
    ),
    "ista.gated": SizedForm(ista.gated, {"tokens": LENGTHS, "words": (1, 4, 96)}, {"dtype": DTYPES[:2]}),
}


def _drawn(name: str, form: SizedForm, number: int) -> Iterator[dict]:
    """Yield the arguments of a form's calls; ``number`` tells one draw of all of them from another."""
    draw = random.Random(f"{name} {number}")
    for sizes in itertools.product(*form.crossed.values()):
        arguments = dict(zip(form.crossed, sizes, strict=True))
        arguments |= {key: draw.choice(values) for key, values in form.drawn.items()}
        for options in form.options:
            arguments |= draw.choice(options)
        yield arguments


def calls(draws: int = 1) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield every call by what makes it, as "tssa.causal(nheads=1, ...)"."""
    for number, (name, form) in itertools.product(range(draws), FORMS.items()):
        for arguments in _drawn(name, form, number):
            said = ", ".join(f"{key}={value}" for key, value in arguments.items())
            yield f"{name}({said})", form.make(**arguments)
