"""Every form of tssa in many widths and dtypes on every GPU: ``make aot``. Not collected by name: it takes minutes."""

import pytest
import torch

from tests.tools.aot import harness

harness.needs_compiler()

from tests.ops.tssa.aot import causal, decode, full  # noqa: E402  # only where Triton compiles

IMAGES, TEXTS = [(8, 48), (16, 48), (5, 88), (1, 128)], [(12, 64), (20, 64)]
FORMS = {
    "whole": (lambda *shape: full(197, *shape), IMAGES),
    "chunks": (lambda *shape: full(4096, *shape), IMAGES),
    "causal": (lambda *shape: causal(1024, *shape), TEXTS),
    "decode": (lambda *shape: decode(1, *shape), TEXTS),
}
OPTIONS = {
    "whole-padded-dropout": full(197, 8, 48, padded=True, dropout_p=0.1),
    "whole-packed-fp16": full(197, 8, 48, torch.float16, packed=True),
    "causal-short-padded": causal(32, 12, 64, padded=True),
    "causal-packed-dropout": causal(1024, 12, 64, packed=True, dropout_p=0.1),
    "decode-padded-fp16": decode(1, 12, 64, torch.float16, padded=True),
    "prompt-padded": decode(512, 12, 64, padded=True),
}
# name: (call, whether nothing may spill on the GPUs of harness.STRICT)
CALLS = {
    **{
        f"tssa-{form}-{heads}x{head_dim}-{str(dtype)[6:]}": (make(heads, head_dim, dtype), dtype != torch.float32)
        for form, (make, shapes) in FORMS.items()
        for heads, head_dim in shapes
        for dtype in (torch.bfloat16, torch.float32)
    },
    **{f"tssa-{name}": (call, True) for name, call in OPTIONS.items()},
}


@pytest.mark.parametrize("target", harness.TARGETS)
@pytest.mark.parametrize("name", CALLS)
def test_kernels_compile_within_limits(name, target):
    call, strict = CALLS[name]
    assert harness.over_limits(harness.compiled(call, target), target, name, strict) == []
