"""Changes of csrc/mssa/cuda/head_backward.cuh that a test must find: the text, what replaces it, and a case."""

_BARRIER = "barrier_sync(kAllThreads, S::kThreads);\n"
_FENCE = "fence_async_shared();\n"
_LOADED = "      const bool there = row < head.length && channel < call.head_dim;"
_TAIL = f"        {_FENCE}        {_BARRIER}        if (mine)"
_WAIT_A = "    wgmma_wait<0>();\n    pin(t);\n"
_START = "    const uint32_t right = column * kRowBytes;\n"
_OFFSET = "    const int64_t before = call.cu_seqlens != nullptr ? start * tokens.row : sequence * tokens.batch;"

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
    "one-stage": ("stage = 2 * base + S::kStage - stage;", "stage = base;", "197-tokens"),
    "rows-not-kept": ("    keep_rows(s);\n", "", "padded"),
    "columns-not-kept": ("      weigh_columns<COLUMN, kWidth>(columns);\n", "", "holes"),
    "keys-not-masked": ("kKept = S::kMasked ? 2 * S::kTokens : 0;", "kKept = 0;", "padded"),
    "no-lse": ("      if (call.dlse != nullptr && there) sum -=", "      if (false) sum -=", "lse"),
    "no-start": (_OFFSET, _OFFSET.replace("start * tokens.row", "0"), "packed"),
    "channels-beyond": (_LOADED, _LOADED.replace(" && channel < call.head_dim", ""), "40-channels"),
    "rows-beyond": (_LOADED, _LOADED.replace("row < head.length && ", ""), "packed"),
    "one-panel": (
        "    const uint32_t channels = kPanel * S::kPanel;",
        "    const uint32_t channels = 0;",
        "128-channels",
    ),
    "other-pitch": ("(columns, 0, 8 * kPitch)", "(columns, 0, 4 * kPitch)", "a-tail-of-48"),
}
