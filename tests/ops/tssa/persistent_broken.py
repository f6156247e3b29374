"""Changes of the persistent kernels that a test must find: the text, what replaces it, and a case."""

_SUMS = "    __syncthreads();\n    add_groups<S, S::kSums>(scratch, {0});\n    meet<S>({0}, meeting);\n"
_SECOND, _FIRST = _SUMS.format("second"), _SUMS.format("first")

FILES = ("tssa/cuda/persistent*",)  # below csrc
BROKEN = {
    "no-barrier-behind-a-sequence": ("    __syncthreads();  // now the buffer may be filled again\n", "", "196-tokens"),
    "one-buffer": ("fetch(index + stride, 1 - buffer);", "fetch(index + stride, buffer);", "196-tokens"),
    "other-phase": ("(trip / S::kBuffers & 1)", "(trip & 1)", "196-tokens"),
    "not-waited-for": (
        "void wait(int buffer, uint32_t phase) const { mbarrier_wait(barrier(buffer), phase); }",
        "void wait(int buffer, uint32_t phase) const { mbarrier_wait(barrier(buffer), phase ^ 1); }",
        "196-tokens",
    ),
    "membership-not-waited-for": ("copy_async_wait<S::kBuffers - 1>();", "copy_async_wait<2>();", "196-tokens"),
    "membership-of-one-buffer": ("+ buffer * at.by_head);", "+ 0 * buffer * at.by_head);", "196-tokens"),
    "no-fence-of-barriers": ("    mbarrier_init_fence();\n", "", "196-tokens"),
    "bytes-of-one-tensor": ("rows * kBytes + 2 * kBytes", "rows * kBytes / 2 + 2 * kBytes", "196-tokens"),
    "forward-groups-not-waited-for": (_SECOND, _SECOND.replace("    __syncthreads();\n", ""), "196-tokens"),
    "forward-cluster-not-waited-for": (
        _SECOND,
        _SECOND.replace("meet<S>(second, meeting)", "__syncthreads()"),
        "196-tokens",
    ),
    "backward-groups-not-waited-for": (_FIRST, _FIRST.replace("    __syncthreads();\n", ""), "196-tokens"),
    "backward-cluster-not-waited-for": (
        _FIRST,
        _FIRST.replace("meet<S>(first, meeting)", "__syncthreads()"),
        "196-tokens",
    ),
    "softmax-of-some-lanes": (
        "step < S::kLanes; step *= 2) v +=",
        "step < S::kLanes / 2; step *= 2) v +=",
        "196-tokens",
    ),
    "slice-taken-early": (
        "    put(first, first + count);\n    __syncthreads();\n",
        "    put(first, first + count);\n",
        "196-tokens",
    ),
    "slice-put-early": ("    }\n    __syncthreads();\n  }\n}\n", "    }\n  }\n}\n", "196-tokens"),
    "first-slice-for-all": ("+ first * place.pitch", "+ 0 * first * place.pitch", "196-tokens"),
    "first-slice-of-dout-for-all": ("+ first * dout.pitch", "+ 0 * first * dout.pitch", "196-tokens"),
    "first-block-for-all": ("cut(s, rank, (s.count + S::k", "cut(s, 0 * rank, (s.count + S::k", "196-tokens"),
    "keep-not-waited-for": ("    if constexpr (MASKED) __syncthreads();\n", "", "padded-scattered"),
    "masked-tokens-counted": (
        "MASKED ? x[i] * x[i] * counted",
        "MASKED ? x[i] * x[i] + 0.0f * counted",
        "padded-scattered",
    ),
    "masked-tokens-weigh": (
        "const float weight = members[n * HEADS + v.head] * key_weight<S>(key_weights, n);\n        mass",
        "const float weight = members[n * HEADS + v.head];\n        mass",
        "padded-scattered",
    ),
    "mean-of-masked-tokens": ("gradient - counted * mean[i]", "gradient - mean[i]", "padded-scattered"),
    "membership-without-tokens": ("const bool seen = !MASKED ||", "const bool seen = true ||", "padded-row"),
    "dropout-without-factor": ("bits & 1 ? gate.x * p.keep_factor", "bits & 1 ? gate.x", "dropout"),
    "no-gradient-of-membership": ("if (dmembership.data != nullptr) d[j] +=", "if (false) d[j] +=", "196-tokens"),
    "clusters-not-waited-for": (
        "if (threadIdx.x == 0) counter_wait(",
        "if (threadIdx.x == blockDim.x) counter_wait(",
        "two-clusters",
    ),
    "half-of-the-clusters-waited-for": ("meeting.turn * S::kTogether);", "meeting.turn);", "two-clusters"),
    "totals-of-one-cluster": ("n < S::kTogether; ++n) sum =", "n < S::kTogether - 1; ++n) sum =", "two-clusters"),
    "totals-not-waited-for": (
        "      put_four(own + i, sum);\n    });\n    __syncthreads();\n",
        "      put_four(own + i, sum);\n    });\n",
        "two-clusters",
    ),
    "first-cluster-for-all": (
        "% S::kTogether * S::kCluster + cluster_rank();",
        "* 0 + cluster_rank();",
        "two-clusters",
    ),
}
