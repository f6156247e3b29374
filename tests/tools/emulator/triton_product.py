"""Products that Triton compiles to wgmma, whose descriptors and registers the emulator's are held to."""

import triton
import triton.language as tl


@triton.jit
def kernel(a_ptr, b_ptr, out_ptr, COLUMNS: tl.constexpr, INNER: tl.constexpr, MN_A: tl.constexpr, MN_B: tl.constexpr):
    """out = a b^T; a is (64, INNER), b (COLUMNS, INNER), each transposed in memory if MN."""
    offs_m, offs_n, offs_k = tl.arange(0, 64), tl.arange(0, COLUMNS), tl.arange(0, INNER)
    if MN_A:
        a = tl.trans(tl.load(a_ptr + offs_k[:, None] * 64 + offs_m[None, :]))
    else:
        a = tl.load(a_ptr + offs_m[:, None] * INNER + offs_k[None, :])  # (64, INNER)
    if MN_B:
        b = tl.load(b_ptr + offs_k[:, None] * COLUMNS + offs_n[None, :])
    else:
        b = tl.trans(tl.load(b_ptr + offs_n[:, None] * INNER + offs_k[None, :]))  # (INNER, COLUMNS)
    tl.store(out_ptr + offs_m[:, None] * COLUMNS + offs_n[None, :], tl.dot(a, b))


@triton.jit
def chained(a_ptr, b_ptr, out_ptr, COLUMNS: tl.constexpr, INNER: tl.constexpr):
    """out = (a b^T) b, of which a b^T stays in registers; a is (64, INNER), b (COLUMNS, INNER)."""
    offs_m, offs_n, offs_k = tl.arange(0, 64), tl.arange(0, COLUMNS), tl.arange(0, INNER)
    a = tl.load(a_ptr + offs_m[:, None] * INNER + offs_k[None, :])  # (64, INNER)
    b = tl.load(b_ptr + offs_n[:, None] * INNER + offs_k[None, :])  # (COLUMNS, INNER)
    s = tl.dot(a, tl.trans(b))  # (64, COLUMNS)
    tl.store(out_ptr + offs_m[:, None] * INNER + offs_k[None, :], tl.dot(s.to(a.dtype), b))
