"""Changes of the walking kernels that a test must find: the text, what replaces it, and a case."""

_SUMS = "    __syncthreads();\n    add_groups<S, S::k{0}>(scratch, {1});\n    cluster_sync();\n"
_FIRST, _SECOND = _SUMS.format("Width", "first"), _SUMS.format("Sums", "second")

FILES = ("tssa/cuda/walking*",)  # below csrc

# Of walking.cuh and walking_forward.cuh.
BROKEN = {
    "no-barrier-behind-a-step": ("    __syncthreads();  // now the buffer may be filled again\n", "", "three-steps"),
    "one-buffer": ("fetch(ahead, 1 - buffer);", "fetch(ahead, buffer);", "three-steps"),
    "other-phase": ("(trip / S::kBuffers & 1)", "(trip & 1)", "three-steps"),
    "not-waited-for": (
        "mbarrier_wait(barrier(buffer), phase); }",
        "mbarrier_wait(barrier(buffer), phase ^ 1); }",
        "three-steps",
    ),
    "no-fence-of-barriers": ("    mbarrier_init_fence();\n", "", "three-steps"),
    "bytes-of-half-the-tokens": ("s.rows() * S::kWidth * 2);", "s.rows() * S::kWidth);", "three-steps"),
    "first-groups-not-waited-for": (_FIRST, _FIRST.replace("    __syncthreads();\n", ""), "three-steps"),
    "first-cluster-not-waited-for": (_FIRST, _FIRST.replace("cluster_sync", "__syncthreads"), "three-steps"),
    "second-groups-not-waited-for": (_SECOND, _SECOND.replace("    __syncthreads();\n", ""), "three-steps"),
    "second-cluster-not-waited-for": (_SECOND, _SECOND.replace("cluster_sync", "__syncthreads"), "three-steps"),
    "sums-overwritten-early": (
        "    get_vector(sums + v.column(), running);\n    __syncthreads();\n",
        "    get_vector(sums + v.column(), running);\n",
        "three-steps",
    ),
    "ranks-in-another-order": (
        "if (r == rank) before = sum;",
        "if (r == S::kCluster - 1 - rank) before = sum;",
        "three-steps",
    ),
    "carry-of-another-sequence": ("start ? 0.0 : carry[j]", "start ? carry[j] : carry[j]", "whole-steps"),
    "carry-forgotten": ("start ? 0.0 : carry[j]", "0.0 * start", "three-steps"),
    "groups-alike": (
        "      before = next;\n",
        "      before = plus(before, by_each(next, [](float v) { return 0.0f * v; }));\n",
        "three-steps",
    ),
    "steps-of-the-longest": ("(sequence_of(p, index).count + stride", "(p.seqlen - 1 + stride", "packed"),
    "one-group-for-all": ("first = v.group * rows_each,", "first = 0 * v.group * rows_each,", "three-steps"),
    "masked-tokens-counted": (
        "const float scale = kWalkScale * key_weight<S>(key_weights, n);\n#pragma unroll\n"
        "        for (int i = 0; i < 8; ++i) acc",
        "const float scale = kWalkScale;\n#pragma unroll\n        for (int i = 0; i < 8; ++i) acc",
        "padded-scattered",
    ),
    "membership-before-kept-tokens": ("const bool seen = !MASKED ||", "const bool seen = true ||", "padded-left"),
    "bias-of-another-place": (
        "min(position, f.bias_tokens - 1)",
        "min(position / 2, f.bias_tokens - 1)",
        "three-steps",
    ),
    "dropout-of-another-token": ("v.head, s.first + n, 1, v.channel", "v.head, n, 1, v.channel", "dropout"),
    "mass-without-its-token": (
        "        mass += weight;\n        const float masses",
        "        const float masses",
        "three-steps",
    ),
}
# Of the sums that a forward saves.
_PLACE = "step_sums_place<S>(p, s.index, every, (s.first + n) / every - 1)"
BROKEN |= {
    "saved-a-place-early": (_PLACE, _PLACE.replace(" - 1)", " - 1 - (s.first + n > every))"), "three-steps"),
    "saved-a-token-early": ("/ every + 1) * every - s.first;", "/ every + 1) * every - s.first - 1;", "mixed-norms"),
    "saved-for-another-sequence": (_PLACE, _PLACE.replace("s.index", "0 * s.index"), "whole-steps"),
    "saved-not-at-all": ("if (n == next && n < ends) save", "if (n == next && n < 0) save", "three-steps"),
    "saved-behind-the-end": ("if (n == next && n < ends) save", "if (n == next) save", "whole-steps"),
    "saved-moments-of-another-head": (
        "put_vector(saved + v.column(), running);",
        "put_vector(saved + (v.column() + HEAD_DIM) % S::kWidth, running);",
        "three-steps",
    ),
    "saved-energies-of-another-head": (
        "put_vector(saved + S::kSums + v.column(), running);",
        "put_vector(saved + S::kSums + (v.column() + HEAD_DIM) % S::kWidth, running);",
        "three-steps",
    ),
    "saved-mass-of-another-head": (
        "saved[S::kWidth + v.head] = mass",
        "saved[S::kWidth + (v.head + 1) % HEADS] = mass",
        "three-steps",
    ),
    "saved-in-another-scale": ("v.head] = mass * kWalkScale;", "v.head] = mass;", "three-steps"),
    "back-not-walked": ("BACK && p.sums_every == 0", "BACK && p.sums_every < 0", "three-steps"),
    "back-saved-for-another-sequence": (
        "step_sums_place<S>(p, s.index, S::kCluster",
        "step_sums_place<S>(p, s.index / 2, S::kCluster",
        "whole-steps",
    ),
}
# Of walking_backward.cuh.
_KEPT = "        tokens.template add<{0}>(0, tile, running, {1});\n"
_CLUSTER = "    cluster_sync();\n    behind_groups<S, S::k{0}>"
BROKEN |= {
    "back-groups-not-waited-for": ("    __syncthreads();\n    // Peers may", "    // Peers may", "three-steps"),
    "back-sums-of-one-block": (
        "    cluster_sync();\n    const int number",
        "    __syncthreads();\n    const int number",
        "three-steps",
    ),
    "back-kept-of-one-block": (
        "sum = cluster_total_4<S>(own + i), kept",
        "sum = four_at(own + i), kept",
        "three-steps",
    ),
    "back-kept-of-another-sequence": (
        "carried_slopes, through_step, number == 0);",
        "carried_slopes, through_step, false);",
        "whole-steps",
    ),
    "back-blocks-before-left-out": ("if (r < rank) sum = plus", "if (r > rank) sum = plus", "three-steps"),
    "back-slopes-not-waited-for": (
        _CLUSTER.format("Sums"),
        _CLUSTER.format("Sums").replace("cluster_sync();", ""),
        "three-steps",
    ),
    "back-sums-of-the-next-step": (
        "nullptr : through_step - (S::kSums + S::kWidth);",
        "nullptr : through_step;",
        "three-steps",
    ),
    "back-steps-forwards": (
        "BACK ? count - 1 - abs(number) : number",
        "BACK ? number + (number < 0) * (count - 1) : number",
        "three-steps",
    ),
    "back-moments-without-earlier-tiles": (
        _KEPT.format("true", "mass"),
        _KEPT.format("true", "mass").replace("tile,", "0 * tile,"),
        "three-steps",
    ),
    "back-energies-without-earlier-tiles": (
        _KEPT.format("false", "unused"),
        _KEPT.format("false", "unused").replace("tile,", "0 * tile,"),
        "three-steps",
    ),
    "back-ranks-in-another-order": (
        "if (r == rank) behind = sum;",
        "if (r == S::kCluster - 1 - rank) behind = sum;",
        "three-steps",
    ),
    "back-masses-not-waited-for": (
        "    add_groups<S, S::kWidth>(groups, first);\n    __syncthreads();\n",
        "    add_groups<S, S::kWidth>(groups, first);\n",
        "three-steps",
    ),
    "back-masses-of-groups": (
        "groups[g * S::kSums + S::kWidth + h] = 0.0f;",
        "groups[g * S::kSums + S::kWidth + h] = sum;",
        "three-steps",
    ),
    "back-dropout-without-factor": (
        "p.seed == nullptr ? 1.0f : p.keep_factor",
        "p.seed == nullptr ? 1.0f : 1.0f",
        "dropout",
    ),
    "back-dropped-gradients-kept": ("bits >> i & 1 ? g[i] : 0.0f;", "bits >> i & 1 ? g[i] : g[i];", "dropout"),
    "back-membership-not-waited-for": ("copy_async_wait<S::kBuffers - 1>();", "copy_async_wait<2>();", "three-steps"),
    "back-dtemp-of-the-last-step": ("(start ? 0.0 : dtemp)", "(start ? 0.0 : 0.0 * dtemp)", "three-steps"),
    "back-dtemp-of-another-sequence": ("(start ? 0.0 : dtemp)", "(start ? dtemp : dtemp)", "whole-steps"),
    "back-dtemp-without-bias": ("gradient * (HEAD_DIM * bias[t]);", "gradient * (0.0f * bias[t]);", "three-steps"),
    "back-no-gradient-of-membership": (
        "if (dmembership.data != nullptr) d[j] +=",
        "if (dmembership.data == nullptr) d[j] +=",
        "three-steps",
    ),
    "back-own-sum-twice": ("(above ? earlier[r][i] * inverse : 1.0f)", "(above ? sum * inverse : 1.0f)", "three-steps"),
    "back-part-not-kept": ("          parts.put(t, g);\n        }\n      }\n", "        }\n      }\n", "three-steps"),
    "back-no-logits-for-the-bias": (
        "j < S::kOfLane && own_row && b.bias != nullptr",
        "j < S::kOfLane && own_row && b.bias == nullptr",
        "three-steps",
    ),
    "back-masked-tokens-behind": ("later[i] * scale);", "later[i] * kWalkScale);", "padded-scattered"),
    "back-masked-tokens-weigh": ("twice = 2.0f * member * counted,", "twice = 2.0f * member,", "padded-scattered"),
}
