"""Changes of the kernels of whole heads that a test must find: the text, what replaces it, and a case."""

_BARRIER = "barrier_sync(kAllThreads, S::kThreads);\n"
_FENCE = "fence_async_shared();\n"
_LOADED = "      const bool there = row < head.length && 64 * panel + 8 * chunk < call.head_dim;"
_TAIL = f"        {_FENCE}        {_BARRIER}        if (mine)"
_WAIT_A = "    wgmma_wait<0>();\n    pin(t);\n"
_START = "    float (&s)[COLUMNS / 2] = sums.s, (&t)[COLUMNS / 2] = sums.t;\n    wgmma_fence();\n"
_OFFSET = "    return (call.cu_seqlens != nullptr ? start * rows.row : sequence * rows.batch)"

# Below csrc.
HEAD_FILES = ("mssa/cuda/head*", "mssa/cuda/hopper_tile", "mssa/cuda/scaled_row")
LONG_FORWARD_FILES = ("mssa/cuda/long_forward", "mssa/cuda/long_rows")
LONG_BACKWARD_FILES = ("mssa/cuda/long_[bdgs]*", "mssa/cuda/scaled_row")

# Of csrc/mssa/cuda/head_gradient.cuh and head_backward.cuh.
BROKEN = {
    "no-fence-behind-g": (f"      {_FENCE}      const bool of_warp", "      const bool of_warp", "197-tokens"),
    "no-fence-behind-columns": (_TAIL, f"        {_BARRIER}        if (mine)", "197-tokens"),
    "no-barrier-behind-columns": (_TAIL, f"        {_FENCE}        if (mine)", "197-tokens"),
    "no-barrier-behind-a-head": (
        f"    {_BARRIER[:-1]}  // before anything",
        "    // before anything",
        "128-channels-padded",
    ),
    "no-wait-for-a-head": (f"    copy_async_wait<0>();\n    {_BARRIER}", f"    {_BARRIER}", "197-tokens"),
    "no-syncwarp": ("      __syncwarp();\n      const Head own_head", "      const Head own_head", "197-tokens"),
    "no-wait-for-a": (_WAIT_A, "", "197-tokens"),
    "no-wait-for-sums": ("      wgmma_wait<0>();\n      pin_terms<true>", "      pin_terms<true>", "197-tokens"),
    "no-product-fence": (_START, _START.replace("    wgmma_fence();\n", ""), "197-tokens"),
    "other-rows": ("gradient.left = stage + 64 * place.group * kRowBytes;", "gradient.left = stage;", "197-tokens"),
    "deltas-swapped": ("const float of_query = (e % 2 == 0 ?", "const float of_query = (e % 2 != 0 ?", "197-tokens"),
    "one-stage": ("call, next, 2 * base + S::kStage - stage)", "call, next, stage)", "197-tokens"),
    "rows-not-kept": ("      keep_rows<kWidth, kSide>(sums.s, behind);\n", "", "padded"),
    "columns-not-kept": ("        weigh_columns<COLUMN, kWidth, kSide>(columns, behind);\n", "", "holes"),
    "keys-not-masked": ("kKept = S::kMasked ? 2 * S::kTokens : 0;", "kKept = 0;", "padded"),
    "no-lse": ("      if (call.dlse != nullptr && there) scaled.delta -=", "      if (false) scaled.delta -=", "lse"),
    "no-start": (_OFFSET, _OFFSET.replace("start * rows.row", "0 * rows.row"), "packed"),
    "channels-beyond": (_LOADED, _LOADED.replace(" && 64 * panel + 8 * chunk < call.head_dim", ""), "40-channels"),
    "rows-beyond": (_LOADED, _LOADED.replace("row < head.length && ", ""), "packed"),
    "one-panel": (
        "    const uint32_t channels = kPanel * S::kPanel;",
        "    const uint32_t channels = 0;",
        "128-channels",
    ),
    "sides-swapped": ("t[i] = by > 0 ? t[i] : by < 0 ?", "t[i] = by < 0 ? t[i] : by > 0 ?", "causal"),
    "itself-as-key-alone": (": t[i] + sums.more[i];", ": t[i];", "causal"),
    "queries-before-keys": ("s[i] = behind + row_of(i) > column_of(i)", "s[i] = behind + row_of(i) < 0", "causal"),
    "keys-behind-rows": (
        "s[i] = behind + row_of(i) < column_of(i)",
        "s[i] = behind + row_of(i) < -999",
        "causal-a-tail-of-48",
    ),
    "tail-of-all-rows": ("if (S::kCausal && kk < 4 * S::kBlocks) continue;", "", "causal"),
    "deltas-of-later-tokens": ("is_key = is_key && key <= row + row_of(i);", "is_key = is_key;", "causal-alike"),
    "short-diagonal": ("COLUMN < 64 * GROUP + 64 ? Side::kBoth", "COLUMN < 64 * GROUP + 32 ? Side::kBoth", "causal"),
    "other-pitch": ("(columns, 0, 8 * kPitch)", "(columns, 0, 4 * kPitch)", "a-tail-of-48"),
}

_SYNC = "__syncthreads();"
_TAIL_READY = f"        output.put_sums();\n        {_FENCE}        {_SYNC}\n"
_STAGED = "output.acc, inverse[0], inverse[1], lane);\n"
_LOADED_HEAD = f"    copy_async_wait<0>();\n    {_FENCE}    {_SYNC}\n"
_SCORES_READY = "    wgmma_wait<(COLUMN > 0 && !(S::kCausal && COLUMN > 64 * S::kBlocks))>();\n"
_RAISE = "    float raise = -S::kTop;\n"
_SUMS_READY = "wait_for_sums<(next_column<FIRST, COLUMN>() < S::kRows)>();"

# Of csrc/mssa/cuda/head_output.cuh and head_forward.cuh.
BROKEN_FORWARD = {
    "no-wait-for-a-head": (_LOADED_HEAD, f"    {_FENCE}    {_SYNC}\n", "197-tokens"),
    "no-fence-behind-a-head": (_LOADED_HEAD, f"    copy_async_wait<0>();\n    {_SYNC}\n", "197-tokens"),
    "no-barrier-behind-norms": (f"    {_SYNC}\n{_RAISE}", _RAISE, "197-tokens"),
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
    "no-wait-for-scores": (_SCORES_READY, "", "197-tokens"),
    "no-wait-for-the-tail": (_SCORES_READY, "    wgmma_wait<(COLUMN > 0)>();\n", "causal-a-tail-of-48"),
    "no-barrier-behind-the-largest": (
        f"      add_largest<S>(base);\n      {_SYNC}\n",
        "      add_largest<S>(base);\n",
        "causal",
    ),
    "later-keys": ("token < 0 ? 0 : token > 31 ?", "token > -64 ?", "causal"),
    "later-keys-of-the-tail": ("e / 2 * 8 <= column;", "e / 2 * 8 <= column + 64;", "causal"),
    "not-itself": ("2 * (1u << token) - 1", "(1u << token) - 1", "causal"),
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
    "keys-not-masked": (
        "|| key_mask[row]);\n    const uint32_t",
        "|| key_mask[row] < 2);\n    const uint32_t",
        "holes",
    ),
    "columns-not-masked": ("seen && (keys >> e / 2 * 8 & 1)", "seen && ((keys | ~0u) >> e / 2 * 8 & 1)", "holes"),
    "one-panel": (
        "matrix_descriptor(output.w + panel * S::kPanel, 0, 1024)",
        "matrix_descriptor(output.w, 0, 1024)",
        "128-channels",
    ),
    "transposed-chunks": ("chunk = 2 * at.warp + (lane >> 3 & 1)", "chunk = 2 * at.warp", "197-tokens"),
    "lse-of-rounded-weights": ("output.lse_of(exact, output.shift", "output.lse_of(total, output.shift", "197-tokens"),
    "no-sequence": ("const uint64_t out = head.offset(call, call.out)", "const uint64_t out = 0", "packed"),
}

_FILLED = "      copy_async_wait<S::kAhead>();\n      fence_async_shared();\n      __syncwarp();\n"
_OWN = "    copy_async_wait<0>();\n    fence_async_shared();\n    barrier_sync(1 + at.group, 128);\n"
_SCORES = "      wgmma_wait<1>();\n      pin(s);\n      weigh(s, n,"

# Of csrc/mssa/cuda/long_rows.cuh and long_forward.cuh.
BROKEN_LONG_FORWARD = {
    "no-wait-for-copies": (_FILLED, _FILLED.replace("kAhead", "kStages"), "257-tokens"),
    "no-fence-behind-copies": (_FILLED, _FILLED.replace("fence_async_shared();", ""), "257-tokens"),
    "no-syncwarp-behind-copies": (_FILLED, _FILLED.replace("__syncwarp();", ""), "257-tokens"),
    "no-wait-for-a-tile": ("      stages.wait_full(n);\n", "", "257-tokens"),
    "other-phase": ("tile / S::kStages & 1);", "0);", "many-tiles"),
    "no-wait-for-a-free-stage": ("(n / S::kStages & 1) ^ 1);", "n / S::kStages & 1);", "many-tiles"),
    "released-early": (
        "      wait_for_sums();\n      stages.release(n - 1);\n",
        "      stages.release(n - 1);\n      wait_for_sums();\n",
        "many-tiles",
    ),
    "released-once-too-often": ("stages.release(n - 1);\n", "stages.release(n);\n", "many-tiles"),
    "no-fence-behind-own-rows": (_OWN, _OWN.replace("    fence_async_shared();\n", ""), "257-tokens"),
    "no-barrier-behind-own-rows": (_OWN, _OWN.replace("    barrier_sync(1 + at.group, 128);\n", ""), "257-tokens"),
    "no-wait-for-own-rows": (_OWN, _OWN.replace("    copy_async_wait<0>();\n", ""), "257-tokens"),
    "no-fence-behind-ones": ("  fence_async_shared();\n  __syncthreads();\n", "  __syncthreads();\n", "packed"),
    "no-wait-for-scores": (_SCORES, _SCORES.replace("      wgmma_wait<1>();\n", ""), "257-tokens"),
    "no-wait-for-sums": ("wait_for_sums() {\n    wgmma_wait<0>();\n", "wait_for_sums() {\n", "257-tokens"),
    "no-turn": ("      if (!last) barrier_arrive", "      if (!last && n > 9) barrier_arrive", "257-tokens"),
    "sums-of-the-next-tile": ("start_sums(n - 1);", "start_sums(n);", "257-tokens"),
    "rows-of-the-first-group": ("S::kOwnAt + 64 * at.group * kRowBytes, right,", "S::kOwnAt, right,", "257-tokens"),
    "keys-beyond": ("token < head.length && (key_mask == nullptr", "(key_mask == nullptr", "257-tokens"),
    "keys-not-masked": ("|| key_mask[token]));", "|| key_mask[token] < 2));", "holes"),
    "keys-of-another-tile": ("S::kKeys + tile % S::kStages * (S::kTile / 8)", "S::kKeys", "causal-holes"),
    "later-keys": ("bits_up_to(row(half) - column - 32 * word)", "bits_up_to(row(half) - column)", "causal"),
    "diagonal-of-the-block": ("(S::kCausal && end > first + 1)", "(S::kCausal && end > first + 64)", "causal"),
    "tiles-of-the-block": ("min(head.length, rows + S::kRows)", "min(head.length, rows + 64)", "causal"),
    "one-panel": ("S::kOwnPanel, S::kPanel,", "0, S::kPanel,", "128-channels"),
    "lse-of-rounded-weights": ("(log2_fast(total) + shift[half])", "(log2_fast(rounded) + shift[half])", "257-tokens"),
    "no-syncwarp-behind-staging": (
        "inverse[1], lane);\n    __syncwarp();\n    store_rows<S>(call, head.first",
        "inverse[1], lane);\n    store_rows<S>(call, head.first",
        "257-tokens",
    ),
}

_WEIGHED = "      weigh<WALK>(s, n);\n      wgmma_wait<1>();\n"
_LOADED_TILE = "    copy_async_wait<0>();\n    fence_async_shared();\n    __syncthreads();\n    float s["

# Of csrc/mssa/cuda/long_backward.cuh, long_gradient.cuh, long_scale.cuh and long_delta.cuh.
BROKEN_LONG_BACKWARD = {
    "no-wait-for-a-tile": ("      stages.wait_full(n);\n      start<WALK>", "      start<WALK>", "257-tokens"),
    "no-wait-for-scores": ("      wgmma_wait<2>();\n", "", "257-tokens"),
    "no-wait-for-a": (_WEIGHED, _WEIGHED.replace("      wgmma_wait<1>();\n", ""), "257-tokens"),
    "no-wait-for-sums": ("(s, t);\n      wait_for_sums();\n", "(s, t);\n", "257-tokens"),
    "own-tile-released": ("if (!again) stages.release", "if (!again || to > 0) stages.release", "causal"),
    "own-tile-kept": ("if (!again) stages.release", "if (!again && to < 0) stages.release", "padded"),
    "keys-behind-rows": ("WALK == Walk::kKeys ? by < 0 : by > 0", "WALK == Walk::kKeys ? by < -63 : by > 0", "causal"),
    "queries-before-keys": ("WALK == Walk::kKeys ? by < 0 : by > 0", "WALK == Walk::kKeys && by < 0", "causal"),
    "itself-as-key-alone": ("? by < 0 : by > 0", "? by < 0 : by >= 0", "causal"),
    "no-queries": ("causal ? place : count, causal ? count : 2 * count", "0, 0", "padded"),
    "keys-not-masked": ("(i % 2 == 0 ? of.y : of.w) : is_key[i / 2]", "fmaxf(of.y, 1.0f) : is_key[i / 2]", "padded"),
    "rows-not-masked": ("(i % 2 == 0 ? of.y : of.w) : is_key[i / 2]", "(i % 2 == 0 ? of.y : of.w) : 1.0f", "padded"),
    "deltas-swapped": ("(i % 2 == 0 ? of.x : of.z)", "(i % 2 != 0 ? of.x : of.z)", "257-tokens"),
    "no-delta-of-rows": ("t[i] -= delta[i % 4 / 2];", "t[i] -= 0.0f;", "causal"),
    "rows-of-the-first-group": ("(s, own_rows(), stage(n)", "(s, at.base + S::kOwnAt, stage(n)", "causal"),
    "one-panel": (
        "w + S::kTokens, S::kOwnPanel, S::kPanel, true",
        "w + S::kTokens, 0, S::kPanel, true",
        "128-channels",
    ),
    "no-lse": (
        "if (call.dlse != nullptr) scaled.delta -=",
        "if (call.dlse != nullptr && call.head_dim == 0) scaled.delta -=",
        "causal",
    ),
    "no-lse-of-sums": ("    if (call.dlse != nullptr) {", "    if (call.dlse == nullptr) {", "causal-alike"),
    "sums-of-w": ("(t, base + S::kTokens, tile", "(t, base, tile", "causal-alike"),
    "no-fence-behind-a-tile": (_LOADED_TILE, _LOADED_TILE.replace("    fence_async_shared();\n", ""), "causal-alike"),
    "no-barrier-behind-a-tile": (_LOADED_TILE, _LOADED_TILE.replace("    __syncthreads();\n", ""), "causal-alike"),
    "no-barrier-before-a-tile": ("    __syncthreads();  // the tile before has been read\n", "", "causal-alike"),
}
