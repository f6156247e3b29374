"""Every form of tssa in many widths and dtypes on every GPU: ``make aot``. Not collected by name: it takes minutes."""

import pytest
import torch

from tests.aot import harness

harness.needs_compiler()

from tests.aot.tssa import causal, decode, full  # noqa: E402  # only where Triton compiles

SHAPES = [(8, 48), (16, 48), (12, 64), (20, 64), (5, 88), (1, 128)]
FORMS = {
    "whole": lambda *shape: full(197, *shape),
    "chunks": lambda *shape: full(4096, *shape),
    "causal": lambda *shape: causal(1024, *shape),
    "decode": lambda *shape: decode(1, *shape),
}
OPTIONS = {
    "whole-padded-dropout": full(197, 8, 48, padded=True, dropout_p=0.1),
    "chunks-packed-dropout": full(4096, 8, 64, packed=True, dropout_p=0.1),
    "causal-short": causal(32, 12, 64),
    "causal-padded-dropout": causal(1024, 12, 64, padded=True, dropout_p=0.1),
    "causal-packed-dropout": causal(1024, 12, 64, packed=True, dropout_p=0.1),
    "decode-padded": decode(1, 12, 64, padded=True),
    "prompt-padded": decode(512, 12, 64, padded=True),
}
# name: (call, whether nothing may spill on the GPUs of harness.STRICT)
CALLS = {
    **{
        f"tssa-{form}-{heads}x{head_dim}-{str(dtype)[6:]}": (make(heads, head_dim, dtype), dtype != torch.float32)
        for form, make in FORMS.items()
        for heads, head_dim in SHAPES
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        if dtype != torch.float16 or (heads, head_dim) in ((8, 48), (12, 64))
    },
    **{f"tssa-{name}": (call, True) for name, call in OPTIONS.items()},
}


@pytest.mark.parametrize("target", harness.TARGETS)
@pytest.mark.parametrize("name", CALLS)
def test_kernels_compile_within_budget(name, target):
    call, strict = CALLS[name]
    assert harness.over_budget(harness.compiled(call, target), target, name, strict) == []
