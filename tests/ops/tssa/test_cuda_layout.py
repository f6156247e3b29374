"""tssa's CUDA kernels under the emulator: strides, packed rows, numbers of heads and channels."""

import pytest
import torch

from crate_kernels import testing
from tests.ops.common import FORMS, outputs_and_gradients, over_tolerance, randn
from tests.ops.tssa import uncovered
from tests.ops.tssa.common import WAYS, bias, call, going, temps, tokens


@WAYS
@pytest.mark.parametrize(
    "shape", [(5, 3), (6, 48), (20, 16), (3, 72), (2, 88), (1, 257), (2, 256), (40, 8), (3, 20)], ids=str
)
def test_any_number_of_heads_and_channels(shape, way, causal, backend, device):
    going(device, way)
    options = {"causal": causal, "return_membership": True}
    for dtype in (torch.float32, torch.bfloat16):
        case = testing.Case("tssa", f"cuda-heads-{shape}-{causal}", (1, shape[0], 35, shape[1]), options)
        assert over_tolerance(case, dtype, backend, "cpu") == []


def layouts(w):
    """Return the values of ``w`` in strides that kernels must read as they are."""
    wide = torch.stack([w, w.roll(1, -1)], -1)
    padded = torch.nn.functional.pad(w, (1, 3))
    return {
        "contiguous": w.contiguous(),
        "every-other-channel": wide.flatten(-2)[..., ::2],
        "unaligned": padded[..., 1 : 1 + w.shape[-1]],
        "reversed-batch": w.flip(0).contiguous().flip(0),
        "tokens-last": w.transpose(2, 3).contiguous().transpose(2, 3),
    }


@WAYS
@pytest.mark.parametrize("layout", layouts(torch.zeros(1, 1, 1, 1)))
def test_strides_do_not_matter(layout, way, causal, backend, device):
    """Bit for bit where elements are read in the same vectors, and closely where one by one."""
    going(device, way)
    w, dout = tokens(2, 3, 37, 32), tokens(2, 3, 37, 32, seed=1)

    def results(w, dout):
        w, temp = w.detach().requires_grad_(), temps(3).requires_grad_()
        out, membership = call(causal, backend)(w, temp)
        return out.detach(), membership.detach(), *torch.autograd.grad(out, [w, temp], dout)

    expected, actual = results(w, dout), results(layouts(w)[layout], layouts(dout)[layout])
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-6)
    expanded = results(w, torch.ones(()).expand(w.shape))
    torch.testing.assert_close(expanded, results(w, torch.ones(w.shape)), rtol=2e-5, atol=2e-6)


@WAYS
@pytest.mark.parametrize(
    ("bounds", "longest"), [((2, 9, 9, 60), 51), ((0, 20, 21), 16), ((0, 5), 5)], ids=["gaps", "longer", "rest"]
)
def test_packed_rows_of_no_sequence_are_zero(bounds, longest, way, causal, backend, device):
    """Offsets on a GPU are not looked at by the host: what they leave out is written nevertheless."""
    going(device, way)
    w = randn(66, 3, 32, dtype=torch.float32)
    uncovered.check(bounds, longest, causal, backend, w, temps(3))


@FORMS
@pytest.mark.parametrize("bounds", [(-7, 9, 300, 40), (30, 10, 66, 66), (50, 90, 90)], ids=str)
def test_offsets_are_clamped_to_what_exists(bounds, causal, backend):
    """What such offsets mean is nobody's concern; that nothing outside a tensor is touched, the emulator sees."""
    w = randn(66, 3, 32, dtype=torch.float32)
    assert all(result.isfinite().all() for result in uncovered.run(bounds, 40, causal, backend, w, temps(3)))


@FORMS
def test_nothing_to_do(causal, backend):
    for shape in ((2, 3, 0, 16), (0, 3, 5, 16)):
        inputs = (tokens(*shape), temps(shape[1]), *((bias(*shape[1:3]),) if causal else ()))
        out, membership, dw, *others = outputs_and_gradients(call(causal, backend), *inputs)
        assert (out.shape, membership.shape, dw.shape) == (shape, shape[:3], shape)
        assert not any(t.any() for t in others)
