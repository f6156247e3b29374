"""Changes of the backward of long rows by pairs that a test must find: the text, what replaces it, and a case."""

_STORED = "    barrier_sync(kStored, kConsumers);\n"
_READ = "    barrier_sync(kRead, kConsumers);  // other weights may be put\n"
_SIDES = "      wgmma_wait<0>();\n      pin(sides);\n"
_SUMMED = "      this->template wait_for_sums<1>();\n      stages.release(n - 1);\n"
_OWN = "    barrier_sync(LongPairs<S>::kOneGroup + at.group, 128);\n"
_FIRST = "    wgmma_wait<0>();\n    pin(s);\n    this->template start_products"

FILES = ("mssa/cuda/long_[prs]*",)  # below csrc
BROKEN = {
    "no-fence-behind-weights": ("    }\n    fence_async_shared();\n  }\n", "    }\n  }\n", "257-tokens"),
    "no-barrier-behind-weights": (_STORED, "", "257-tokens"),
    "weights-too-early": (_READ, "", "257-tokens"),
    "no-wait-for-the-first-scores": (_FIRST, _FIRST.replace("    wgmma_wait<0>();\n", ""), "257-tokens"),
    "no-wait-for-scores": ("      wgmma_wait<3>();\n", "", "257-tokens"),
    "no-wait-for-a": ("      wgmma_wait<2>();\n", "", "257-tokens"),
    "no-wait-for-sums": ("wait_for_sums<1>();", "wait_for_sums<2>();", "257-tokens"),
    "no-wait-for-sides": (_SIDES, "      pin(sides);\n", "257-tokens"),
    "released-early": (
        _SUMMED,
        "      stages.release(n - 1);\n      this->template wait_for_sums<1>();\n",
        "many-tiles",
    ),
    "no-wait-for-a-tile": ("      stages.wait_full(n);\n", "", "257-tokens"),
    "no-barrier-behind-own-rows": (_OWN, "", "257-tokens"),
    "own-pairs-twice": ("n > at.group) return;", "n >= at.group) return;", "causal"),
    "own-tiles-twice": ("n > at.group) return;", "n != at.group) return;", "many-tiles"),
    "itself-twice": ("by == 0 ? 0.5f * s[i] : s[i];", "by == 0 ? s[i] : s[i];", "257-tokens"),
    "itself-by-half": ("S::kBoth && by == 0", "by == 0", "causal"),
    "sums-of-w": ("advance(w, S::kOwn)", "advance(w, 0)", "257-tokens"),
    "a-for-e": ("descriptor(at.base + S::kE, 16 * kk)", "descriptor(at.base + S::kA, 16 * kk)", "257-tokens"),
    "channels-of-the-first-group": ("S::kOwnPanel : 2 * S::kSideChannels)", "S::kOwnPanel : 0)", "causal"),
    "one-panel": ("S::kPanels == 2 ? S::kOwnPanel :", "S::kPanels == 2 ? 0 :", "128-channels"),
    "numbers-of-the-first-thread": ("to += (fresh(threadIdx.x) & 127) * 4;", "to += 0;", "257-tokens"),
    "numbers-between-two-fours": ("(fresh(threadIdx.x) & 127) * 4;", "(fresh(threadIdx.x) & 127) * 4 + 2;", "causal"),
    "channels-of-the-next-eight": ("add_global_4(to + i * 512,", "add_global_4(to + (i ^ 1) * 512,", "128-channels"),
    "sides-of-the-first-tile": ("      to += 64 * S::kDim;\n", "", "257-tokens"),
    "own-sums-of-the-first-group": ("sums_of(head, first / S::kTile", "sums_of(head, rows / S::kTile", "causal"),
    "no-zeros": ("call.sums != nullptr && half", "call.sums == nullptr && half", "257-tokens"),
    "half-of-the-zeros": ("half < first / 64 + 2", "half < first / 64 + 1", "257-tokens"),
    "sums-of-two-sequences": ("at += of.start / 64 + of.sequence;", "at += of.start / 64;", "packed"),
    "blocks-of-keys-left": ("key_mask[row]) == 0) return;", "key_mask[row]) != 0) return;", "padded"),
    "from-own-tiles": ("diagonal ? rows / S::kTile : 0", "diagonal ? rows / S::kTile : rows / S::kTile", "padded"),
    "first-rows-rounded": ("tile * S::kTile + 16 * warp,", "tile * S::kTile + 0 * warp,", "causal"),
}
