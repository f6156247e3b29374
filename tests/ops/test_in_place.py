"""Changing an output in place: as right as eager, or refused in words that say what to do."""

import re

import pytest
import torch

from crate_kernels import ista, ista_overcomplete, mssa, tssa
from tests.ops.common import SELDOM, backends, randn, seldom

ONES = torch.ones(3)
# Outputs of each function, and those that its backward reads, as eager's softmax, logsumexp and ReLU read theirs.
# mssa's out is read as F.scaled_dot_product_attention's is; reference keeps the weights instead.
FORMS = {
    "mssa": (lambda w, b: mssa(w, return_lse=True, backend=b), (True, True)),
    "mssa-threshold": (lambda w, b: mssa(w, phi="threshold", threshold=0.3, backend=b), (True,)),
    "tssa": (lambda w, b: tssa(w, ONES.to(w), return_membership=True, backend=b), (False, True)),
    "tssa-causal": (lambda w, b: tssa(w, ONES.to(w), causal=True, return_membership=True, backend=b), (False, True)),
    "ista": (lambda w, b: ista(w, dictionary(w, 8), backend=b), (True,)),
    "ista_overcomplete": (lambda w, b: ista_overcomplete(w, dictionary(w, 12), backend=b), (False,)),
}
OUTPUTS = [
    pytest.param(form, *p.values, which, id=f"{form}-{which}-{p.id}", marks=p.marks)
    for form, (_, reads) in FORMS.items()
    for p in backends(form.partition("-")[0].removesuffix("_overcomplete"))
    for which in range(len(reads))
]


DICTIONARY = randn(8, 12, seed=3, dtype=torch.float32) * 8**-0.5


def dictionary(w, hidden):
    return DICTIONARY[:, :hidden].to(w)


def outputs(form, w, backend):
    result = FORMS[form][0](w, backend)
    return result if isinstance(result, tuple) else (result,)


def gradient(function, w):
    w = w.detach().requires_grad_()
    out = function(w)
    return torch.autograd.grad((out * out.detach().cos()).sum(), w)[0]


COMPILED = pytest.mark.parametrize("compiled", seldom({"eager": False, "compiled": True}, "eager"))
ADVICE = r"{op}: an input or output of this call was changed in place .* out = out \+ x, or out\.clone\(\)"


def outcome(function, w):
    try:
        return gradient(function, w)
    except RuntimeError as error:  # the compiler raises it too
        return str(error)


@COMPILED
@pytest.mark.parametrize(("form", "backend", "device", "which"), OUTPUTS)
def test_an_output_changed_in_place(form, backend, device, which, compiled):
    torch._dynamo.reset()
    w, op, reads = randn(2, 3, 6, 8, dtype=torch.float32, device=device), form.partition("-")[0], FORMS[form][1][which]

    def changed(w):
        out = outputs(form, w, backend)[which]
        out += 1
        return out

    actual = outcome(torch.compile(changed, backend="aot_eager", fullgraph=True) if compiled else changed, w)
    if not reads or isinstance(actual, torch.Tensor):
        # PyTorch alone decides which of its own results it reads.
        assert not reads or backend in ("reference", "composite")
        expected = gradient(lambda w: outputs(form, w, backend)[which] + 1, w)
        torch.testing.assert_close(actual, expected)
    elif backend == "reference" or (op == "mssa" and backend == "composite"):
        assert "modified by an inplace operation" in actual or re.search(ADVICE.format(op=op), actual)
    else:
        assert re.search(ADVICE.format(op=op), actual)


@SELDOM
@pytest.mark.parametrize(("form", "backend", "device", "which"), OUTPUTS)
def test_a_copy_may_be_changed(form, backend, device, which):
    w = randn(2, 3, 6, 8, dtype=torch.float32, device=device)
    expected = gradient(lambda w: outputs(form, w, backend)[which] + 1, w)
    actual = gradient(lambda w: outputs(form, w, backend)[which].clone().add_(1), w)
    torch.testing.assert_close(actual, expected)


@COMPILED
@pytest.mark.parametrize(
    ("form", "backend", "device", "which"), [p for p in OUTPUTS if p.values[3] == 0 and p.values[1] != "reference"]
)
def test_an_input_changed_in_place(form, backend, device, which, compiled):
    torch._dynamo.reset()

    def changed(leaf):
        w = leaf * 1
        out = outputs(form, w, backend)[which]
        w += 1
        return out

    changed = torch.compile(changed, backend="aot_eager", fullgraph=True) if compiled else changed
    w = randn(2, 3, 6, 8, dtype=torch.float32, device=device)
    actual = outcome(changed, w)
    if isinstance(actual, torch.Tensor):
        assert compiled
        torch.testing.assert_close(actual, gradient(lambda w: outputs(form, w, backend)[which], w))
    else:
        assert "changed in place" in actual or "modified" in actual


@SELDOM
@pytest.mark.parametrize(("form", "backend", "device", "which"), [p for p in OUTPUTS if p.values[3] == 0])
def test_a_second_backward_is_refused_as_by_pytorch(form, backend, device, which):
    w = randn(2, 3, 5, 8, dtype=torch.float32, device=device).requires_grad_()
    loss = outputs(form, w, backend)[which].sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
