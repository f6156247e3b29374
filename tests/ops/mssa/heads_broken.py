"""Changes of the kernels of whole heads that a test must find: the text, what replaces it, and a case."""

_BARRIER = "barrier_sync(kAllThreads, S::kThreads);\n"
_FENCE = "fence_async_shared();\n"
_LOADED = "      const bool there = row < head.length && 64 * panel + 8 * chunk < call.head_dim;"
_TAIL = f"        {_FENCE}        {_BARRIER}        if (mine)"
_WAIT_A = "    wgmma_wait<0>();\n    pin(t);\n"
_START = "    const uint32_t right = column * kRowBytes;\n"
_OFFSET = "    const int64_t before = call.cu_seqlens != nullptr ? start * tokens.row : sequence * tokens.batch;"

# Of csrc/mssa/cuda/head_gradient.cuh and head_backward.cuh.
BROKEN = {
    "no-fence-behind-g": (f"      {_FENCE}      barrier_sync(", "      barrier_sync(", "197-tokens"),
    "no-fence-behind-columns": (_TAIL, f"        {_BARRIER}        if (mine)", "197-tokens"),
    "no-barrier-behind-columns": (_TAIL, f"        {_FENCE}        if (mine)", "197-tokens"),
    "no-barrier-behind-a-head": (
        f"    {_BARRIER[:-1]}  // before anything",
        "    // before anything",
        "128-channels-padded",
    ),
    "no-wait-for-a-head": (f"    copy_async_wait<0>();\n    {_BARRIER}", f"    {_BARRIER}", "197-tokens"),
    "no-syncwarp": (
        "      __syncwarp();\n      const HeadTokensOf own_head",
        "      const HeadTokensOf own_head",
        "197-tokens",
    ),
    "no-wait-for-a": (_WAIT_A, "", "197-tokens"),
    "no-wait-for-sums": ("      wgmma_wait<0>();\n      pin(acc);", "      pin(acc);", "197-tokens"),
    "no-product-fence": (f"{_START}    wgmma_fence();\n", _START, "197-tokens"),
    "other-rows": ("gradient.left = stage + 64 * place.group * kRowBytes;", "gradient.left = stage;", "197-tokens"),
    "deltas-swapped": ("t[4 * n] = -delta[0] - d.x", "t[4 * n] = -delta[0] - d.y", "197-tokens"),
    "one-stage": ("call, next, 2 * base + S::kStage - stage)", "call, next, stage)", "197-tokens"),
    "rows-not-kept": ("    keep_rows(s);\n", "", "padded"),
    "columns-not-kept": ("      weigh_columns<COLUMN, kWidth>(columns);\n", "", "holes"),
    "keys-not-masked": ("kKept = S::kMasked ? 2 * S::kTokens : 0;", "kKept = 0;", "padded"),
    "no-lse": ("      if (call.dlse != nullptr && there) sum -=", "      if (false) sum -=", "lse"),
    "no-start": (_OFFSET, _OFFSET.replace("start * tokens.row", "0"), "packed"),
    "channels-beyond": (_LOADED, _LOADED.replace(" && 64 * panel + 8 * chunk < call.head_dim", ""), "40-channels"),
    "rows-beyond": (_LOADED, _LOADED.replace("row < head.length && ", ""), "packed"),
    "one-panel": (
        "    const uint32_t channels = kPanel * S::kPanel;",
        "    const uint32_t channels = 0;",
        "128-channels",
    ),
    "other-pitch": ("(columns, 0, 8 * kPitch)", "(columns, 0, 4 * kPitch)", "a-tail-of-48"),
}

_SYNC = "__syncthreads();"
_TAIL_READY = f"        output.put_sums();\n        {_FENCE}        {_SYNC}\n"
_STAGED = "output.acc, inverse[0], inverse[1], lane);\n"
_LOADED_HEAD = f"    copy_async_wait<0>();\n    {_FENCE}    {_SYNC}\n"
_SUMS_READY = "wait_for_sums<(COLUMN + kWidth < S::kRows)>();"

# Of csrc/mssa/cuda/head_output.cuh and head_forward.cuh.
BROKEN_FORWARD = {
    "no-wait-for-a-head": (_LOADED_HEAD, f"    {_FENCE}    {_SYNC}\n", "197-tokens"),
    "no-fence-behind-a-head": (_LOADED_HEAD, f"    copy_async_wait<0>();\n    {_SYNC}\n", "197-tokens"),
    "no-barrier-behind-norms": (f"    {_SYNC}\n#pragma unroll\n    for (int n = 0", "    for (int n = 0", "197-tokens"),
    "no-fence-behind-columns": (_TAIL_READY, _TAIL_READY.replace(_FENCE, ""), "197-tokens"),
    "no-barrier-behind-columns": (_TAIL_READY, _TAIL_READY.replace(_SYNC, ""), "197-tokens"),
    "no-barrier-behind-the-tail": (
        f"  {_SYNC}\n  const int id = fresh(threadIdx.x), chunk = id & 7;\n  T* const to",
        "  const int id = fresh(threadIdx.x), chunk = id & 7;\n  T* const to",
        "197-tokens",
    ),
    "no-barrier-behind-the-head": (
        f"      {_SYNC}  // before this head's tokens are written over\n",
        "",
        "128-channels-long",
    ),
    "no-syncwarp": (f"{_STAGED}  __syncwarp();\n", _STAGED, "197-tokens"),
    "no-wait-for-scores": ("    wgmma_wait<COLUMN == 0 ? 0 : 1>();\n", "", "197-tokens"),
    "late-wait-for-sums": (_SUMS_READY, "wait_for_sums<2>();", "197-tokens"),
    "one-stage": ("gridDim.x, 2 * base + S::kStage - stage)", "gridDim.x, stage)", "197-tokens"),
    "lse-by-another-shift": (
        "output.lse_of(exact, output.shift[half])",
        "output.lse_of(exact, output.shift[0])",
        "lse",
    ),
    "shift-of-the-row": ("call.factor - of[e % 2])", "call.factor - of[e / 2])", "197-tokens"),
    "sums-of-a-block": ("      if (row >= 64) bits =", "      if (row >= 128) bits =", "197-tokens"),
    "keys-beyond": ("const bool is_key = row < head.length && ", "const bool is_key = ", "packed"),
    "keys-not-masked": ("|| keep[row]);\n    const uint32_t", "|| keep[row] < 2);\n    const uint32_t", "holes"),
    "columns-not-masked": (
        "weights[e] = keys >> e / 2 * 8 & 1 ?",
        "weights[e] = (keys | ~0u) >> e / 2 * 8 & 1 ?",
        "holes",
    ),
    "one-panel": (
        "matrix_descriptor(output.w + panel * S::kPanel, 0, 1024)",
        "matrix_descriptor(output.w, 0, 1024)",
        "128-channels",
    ),
    "transposed-chunks": ("chunk = 2 * at.warp + (lane >> 3 & 1)", "chunk = 2 * at.warp", "197-tokens"),
    "lse-of-rounded-weights": ("output.lse_of(exact, output.shift", "output.lse_of(total, output.shift", "197-tokens"),
    "no-sequence": ("const uint64_t out = head.before(call, call.out)", "const uint64_t out = 0", "packed"),
}
