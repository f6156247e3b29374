"""Packed rows that no sequence covers: 0, with a gradient of 0, wherever the offsets can be read and wherever not."""

import pytest
import torch

import crate_kernels
from tests.ops.common import SELDOM, backends, randn, seldom

TOTAL, NHEADS, HEAD_DIM = 9, 2, 16
OFFSETS = {"before": (2, 5, 9), "behind": (0, 3, 3, 6), "both": (1, 1, 4, 7), "all": (4, 4), "none": (0, 5, 9)}
FORMS = {
    "mssa": lambda w, **packed: crate_kernels.mssa(w, return_lse=True, **packed),
    "tssa": lambda w, **packed: crate_kernels.tssa(w, torch.ones(NHEADS), return_membership=True, **packed),
    "tssa-causal": lambda w, **packed: crate_kernels.tssa(
        w, torch.ones(NHEADS), causal=True, return_membership=True, **packed
    ),
}
CASES = [
    pytest.param(form, *p.values, id=f"{form}-{p.id}", marks=p.marks)
    for form in FORMS
    for p in backends(form.partition("-")[0])
]


def results(function, w, offsets, backend):
    leaf = w.detach().requires_grad_()
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=w.device)
    out, numbers = function(leaf, cu_seqlens=cu_seqlens, max_seqlen=5, backend=backend)
    (dw,) = torch.autograd.grad((out * 1.5).sum() + numbers.sum(), leaf)
    return out.detach(), numbers.detach().t(), dw


def check(function, offsets, backend, device):
    w = randn(TOTAL, NHEADS, HEAD_DIM, dtype=torch.float32, device=device)
    first, last = offsets[0], offsets[-1]
    found = results(function, w, offsets, backend)
    alone = results(function, w[first:last], [n - first for n in offsets], backend)
    for whole, part in zip(found, alone, strict=True):
        torch.testing.assert_close(whole[first:last], part)
        assert not whole[:first].any()
        assert not whole[last:].any()


@pytest.mark.parametrize("name", seldom(OFFSETS.keys(), "both"))
@pytest.mark.parametrize(("form", "backend", "device"), CASES)
def test_rows_that_no_sequence_covers_are_zero(form, backend, device, name):
    check(FORMS[form], OFFSETS[name], backend, device)


@SELDOM
@pytest.mark.parametrize(("form", "backend", "device"), [p for p in CASES if p.values[1] != "reference"])
def test_compiled_they_are_zero_too(form, backend, device):
    compiled = torch.compile(FORMS[form], backend="aot_eager", dynamic=True)
    check(compiled, OFFSETS["both"], backend, device)
