"""One compiled graph serves every marked head_dim, whose default scale is no constant of the graph."""

from functools import partial

import pytest
import torch
import torch._dynamo.testing

import crate_kernels
from crate_kernels._core import backends
from crate_kernels._native import extension

KEPT = torch.tensor([[True, True, True, False, True], [True, False, True, True, True]])
BOUNDS = torch.tensor([0, 2, 5], dtype=torch.int32)
FORMS = {
    "plain": {},
    "causal": {"causal": True},
    "padded": {"key_padding_mask": KEPT},
    "lse": {"return_lse": True},
    "threshold": {"phi": "threshold", "threshold": 0.1},
    "relu": {"phi": "relu"},
    "identity": {"phi": "identity"},
    "scale": {"scale": 0.3},
}
QUICK = ("plain-composite", "plain-cpp", "lse-composite")  # a compiler run takes a second
CASES = {
    f"{form}-{backend}": (backend, options)
    for form, options in FORMS.items()
    for backend in ("composite", "cpp")
    if backend == "composite" or options.get("phi", "threshold") == "threshold"
}


def compiled(function):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    return torch.compile(function, fullgraph=True, backend=counter), counter


def once(function, draw, marked):
    """Require the results and gradients of eager from one graph, for every width."""
    torch._dynamo.reset()
    fast, counter = compiled(function)
    for width in (8, 24, 33):
        w = draw(width).requires_grad_()
        torch._dynamo.mark_dynamic(w, marked)
        results = []
        for each in (fast, function):
            out = each(w)
            total = sum(part.square().sum() for part in (out if isinstance(out, tuple) else (out,)))
            results.append((total.detach(), *torch.autograd.grad(total, w)))
        torch.testing.assert_close(*results)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        pytest.param(*case, id=name, marks=[] if name in QUICK else pytest.mark.exhaustive)
        for name, case in CASES.items()
    ],
)
def test_a_new_head_dim_does_not_recompile(backend, options):
    if backends.unavailable_reason("mssa", backend):
        pytest.skip("needs the C++ extension: python -m crate_kernels build")
    once(partial(crate_kernels.mssa, backend=backend, **options), lambda width: torch.randn(2, 2, 5, width), 3)


@pytest.mark.parametrize("backend", [pytest.param("composite", marks=pytest.mark.exhaustive), None])
def test_a_new_head_dim_of_packed_sequences_does_not_recompile(backend):
    packed = partial(crate_kernels.mssa, cu_seqlens=BOUNDS, max_seqlen=3, backend=backend)
    once(packed, lambda width: torch.randn(5, 2, width), 2)


@pytest.mark.parametrize("shape", [(3,), (3, 1)], ids=str)
def test_heads_that_may_change_meet_temperatures_that_do_not(shape):
    torch._dynamo.reset()
    w, temp = torch.randn(2, 3, 5, 8), torch.ones(shape)
    torch._dynamo.maybe_mark_dynamic(w, 1)
    fast, _ = compiled(crate_kernels.tssa)
    torch.testing.assert_close(fast(w, temp), crate_kernels.tssa(w, temp))


@pytest.mark.skipif(not extension.PATH, reason="needs python -m crate_kernels build: composite has no op of ours")
def test_a_graph_recorded_without_a_scale_has_that_of_its_tokens():
    """As torch.export writes it: an operator whose scale is None."""
    program = torch.export.export(Attention(), (torch.randn(1, 2, 5, 16),))
    x = torch.randn(1, 2, 5, 16)
    torch.testing.assert_close(program.module()(x), crate_kernels.mssa(x))
    (node,) = [node for node in program.graph.nodes if "mssa_fwd" in str(node.target)]
    assert None in node.args


class Attention(torch.nn.Module):
    def forward(self, w):
        return crate_kernels.mssa(w)
