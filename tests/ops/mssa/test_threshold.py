"""The weights that phi="threshold" selects: the same in the forward and in the backward, and none at the threshold."""

import pytest
import torch

from crate_kernels import mssa
from tests.ops.common import TURNS, backends, randn

FUSED = backends("mssa", reference=False)
OPTIONS = {"full": {}, "causal": {"causal": True}, "negative-scale": {"scale": -0.3}, "no-scale": {"scale": 0.0}}


def gradient(w, threshold, backend, dout=None, **options):
    leaf = w.clone().requires_grad_()
    out = mssa(leaf, phi="threshold", threshold=threshold, backend=backend, **options)
    return out.detach(), torch.autograd.grad(out, leaf, torch.ones_like(out) if dout is None else dout)[0]


@pytest.mark.parametrize(("backend", "device"), FUSED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("seqlen", [2, 4, 16])
def test_equal_tokens_are_not_above_their_share(seqlen, dtype, backend, device):
    """Whatever their score is rounded to; by lse, which is rounded, a backward would select every third of these."""
    for value in torch.linspace(0.05, 0.75, 10).tolist():
        w = torch.full((1, 1, seqlen, 16), value, dtype=dtype, device=device)
        out, dw = gradient(w, 1 / seqlen, backend)
        assert not out.any(), value
        assert not dw.any(), value
        out, dw = gradient(w, 0.99 / seqlen, backend)
        assert out.all(), value
        assert dw.all(), value


@TURNS
@pytest.mark.parametrize(("backend", "device"), FUSED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("head_dim", [40, 136])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_backward_selects_what_its_forward_did(options, head_dim, dtype, backend, device):
    """The last channels tell the tokens apart, and the thresholds are above some weights of each row."""
    seqlen = 24
    w = randn(2, 2, seqlen, head_dim, dtype=dtype, device=device)
    w[..., -seqlen:] = 0.25 * torch.eye(seqlen, device=device)
    mask = torch.arange(seqlen, device=device).expand(2, -1) % 7 != 3
    dout = torch.zeros_like(w)
    dout[..., -seqlen:] = torch.eye(seqlen, device=device)
    for threshold in (0.02, 0.045, 0.2):
        out, dw = gradient(w, threshold, backend, dout, key_padding_mask=mask, **options)
        selected = out[..., -seqlen:] != 0
        assert selected.any() or options.get("scale") == 0.0
        assert torch.equal(selected, dw[..., -seqlen:].mT != 0)
