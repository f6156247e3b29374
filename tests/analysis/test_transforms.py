"""torch.compile and vmap of the rates: the same numbers, and what cannot be is refused by name."""

import pytest
import torch
from torch.func import grad, vmap

from crate_kernels import analysis, nn

F64 = torch.float64
Z = torch.randn(3, 10, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
LABELS = torch.stack([torch.arange(10) % 3, torch.arange(10) % 2, torch.arange(10)])
SUBSPACES = torch.linalg.qr(torch.randn(2, 4, 2, dtype=F64, generator=torch.Generator().manual_seed(1))).Q
CALLS = {
    "loss": nn.MCR2Loss(),
    "mcr2": lambda z, labels: analysis.mcr2(z, labels, eps_squared=0.5),
    "class_coding_rate": analysis.class_coding_rate,
    "wide": lambda z, labels: analysis.mcr2(z[:3], labels[:3], eps_squared=0.5),
    "coding_rate": lambda z, _: analysis.coding_rate(z),
    "projected_coding_rate": lambda z, _: analysis.projected_coding_rate(z.view(2, 5, 4)),
    "subspace_coding_rate": lambda z, _: analysis.subspace_coding_rate(z, SUBSPACES),
    "rate_reduction": lambda z, _: analysis.rate_reduction(z, SUBSPACES),
    "rate_gradient": lambda z, _: analysis.rate_gradient(z, SUBSPACES).sin().sum(),
    "sparsity": lambda z, _: analysis.sparsity(z) + 0 * z.sum(),
}
AHEAD = ("mcr2", "rate_reduction")  # of the others, the gradients are eager's
OF_CLASSES = ("loss", "mcr2", "class_coding_rate", "wide")
EVERY = pytest.mark.parametrize("name", CALLS)


def gradient(call, z, labels):
    z = z.detach().requires_grad_()
    value = call(z, labels)
    return value.detach(), torch.autograd.grad(value, z)[0]


@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, "aot_eager" if name in AHEAD else "eager") for name in CALLS]
    + [pytest.param(name, "aot_eager", marks=pytest.mark.exhaustive) for name in CALLS if name not in AHEAD],
)
def test_compiled_in_one_graph(name, backend):
    torch._dynamo.reset()
    call = CALLS[name]
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    with torch._dynamo.config.patch(error_on_recompile=True):  # other labels are other classes
        for labels in LABELS if name in OF_CLASSES else LABELS[:1]:
            torch.testing.assert_close(gradient(compiled, Z[0], labels), gradient(call, Z[0], labels))


@EVERY
def test_each_sample_of_vmap(name):
    call = CALLS[name]
    each = [gradient(call, *one) for one in zip(Z, LABELS, strict=True)]
    torch.testing.assert_close(vmap(call)(Z, LABELS), torch.stack([value for value, _ in each]))
    torch.testing.assert_close(vmap(grad(call))(Z, LABELS), torch.stack([gradient for _, gradient in each]))
    torch.testing.assert_close(vmap(call, (None, 0))(Z[0], LABELS)[1], call(Z[0], LABELS[1]))


@pytest.mark.parametrize("name", OF_CLASSES)
def test_second_derivatives_under_vmap_are_refused(name):
    def twice(z, labels):
        return grad(lambda z: grad(CALLS[name])(z, labels).square().sum())(z)

    assert twice(Z[0], LABELS[0]).isfinite().all()
    with pytest.raises(NotImplementedError, match=r"double backward is not supported under torch\.compile"):
        vmap(twice)(Z, LABELS)


@pytest.mark.parametrize("name", ["mcr2", "class_coding_rate", "coding_rate", "rate_reduction"])
def test_a_sample_that_is_not_finite_is_refused_under_vmap(name):
    z = Z.clone()
    z[1, 2] = torch.inf
    with pytest.raises(torch.linalg.LinAlgError, match=f"^{name}: z.* must be finite"):
        vmap(CALLS[name])(z, LABELS)


def test_the_classes_of_a_compiled_call_are_checked():
    compiled = torch.compile(analysis.class_coding_rate, fullgraph=True, backend="aot_eager")
    with pytest.raises(torch.linalg.LinAlgError, match="class_coding_rate: z must be finite"):
        compiled(torch.nan * Z[0], LABELS[0])
