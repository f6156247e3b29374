"""What FlopCounterMode counts for mssa: two products of scores forward and five backward."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from crate_kernels import mssa
from tests.ops.common import home, kernels, offsets

FLOPS = {
    "full": ((2, 3, 8, 16), {}, 2 * 2 * 3 * 8 * 8 * 16),
    "causal": ((2, 3, 8, 16), {"causal": True}, 2 * 3 * 8 * 8 * 16),
    # Offsets are not shapes: every sequence counts as the longest.
    "packed": ((16, 3, 16), {"cu_seqlens": offsets((5, 11)), "max_seqlen": 11}, 2 * 3 * 16 * 11 * 16),
}


@pytest.mark.usefixtures("plain_backend")
@pytest.mark.parametrize("backend", ["plain", *kernels("mssa")])
@pytest.mark.parametrize(("shape", "options", "product"), FLOPS.values(), ids=FLOPS)
def test_flops_are_counted(shape, options, product, backend):
    device = home(backend)
    w = torch.randn(shape, device=device, requires_grad=True)
    options = {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in options.items()}
    with FlopCounterMode(display=False) as counter:
        mssa(w, **options, backend=backend).sum().backward()
    own = counter.get_flop_counts()["Global"]
    assert {str(op): count for op, count in own.items() if "crate_kernels" in str(op)} == {
        "crate_kernels.mssa_fwd": 2 * product,
        "crate_kernels.mssa_bwd": 5 * product,
    }


@pytest.mark.parametrize("backend", ["composite", "reference"])
def test_flops_of_composite_are_those_of_its_products(backend):
    """As PyTorch counts its attention on GPUs: masked scores too. The eager backward is of two less."""
    w = torch.randn(2, 3, 64, 16, requires_grad=True)
    product = 2 * 2 * 3 * 64 * 64 * 16
    with FlopCounterMode(display=False) as forward:
        out = mssa(w, backend=backend)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert forward.get_total_flops() == 2 * product
    assert backward.get_total_flops() == (5 if backend == "composite" else 4) * product


def test_flops_of_the_logsumexp_are_counted():
    w = torch.randn(2, 3, 64, 16, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        mssa(w, return_lse=True, backend="composite")[1].sum().backward()
    product, own = 2 * 2 * 3 * 64 * 64 * 16, counter.get_flop_counts()["Global"]
    assert [own[getattr(torch.ops.crate_kernels, name)] for name in ("mssa_lse_fwd", "mssa_lse_bwd")] == [
        product,
        3 * product,
    ]
