"""Drawn calls of mssa."""

from tests.apart import oracle, philox, values
from tests.apart.attention import LIMITS, merges, modes, packed_tokens, sdpa_factor, sizes, upstreams
from tests.apart.call import KERNELS, DrawnCall, has_cpp, keywords


def draw(d, seed, kind, forced):
    """Draw a call of mssa."""
    backend, dtype = d.backend(forced)
    shape = batch, nheads, seqlen, head_dim = sizes(d, backend, quadratic=True)
    call = DrawnCall(kind, seed, "mssa", backend, dtype, lenient=backend == "reference")
    what = kind.removeprefix("mssa ")
    if what == "sinks" and d.chance(0.5):  # few keys have no other weight to hide an error in
        shape = batch, nheads, seqlen, head_dim = batch, nheads, d.pick(2, 3, 4, 8), head_dim
    if what == "ones" and backend not in LIMITS:
        shape = batch, nheads, seqlen, head_dim = 1, 1, d.pick(seqlen, 197, 197), d.pick(head_dim, 128, 128)
    causal = d.chance(0.4)
    scale = None
    if what == "scale" or d.chance(0.15):
        scale = d.pick(0.0, 1.0, -0.5, -1.0, d.uniform(-2, 2), d.uniform(0.001, 0.1), 5.0, 50.0, 1e-6)
    phi, threshold = "softmax", None
    if what in ("threshold", "relu", "identity"):
        phi = what
    elif what in ("plain", "layout", "padding", "packed") and d.chance(0.06):
        phi = d.pick("threshold", "relu", "identity")
    if phi == "threshold":
        threshold = d.pick(0.0, 0.01, 0.1, 0.3, 0.5, 0.6, 0.99, 1.0, 2.0, d.uniform(0, 1))
    dropout = d.pick(0.1, 0.5, 0.9, d.uniform(0, 0.99)) if "dropout" in what or d.chance(0.1) else 0.0
    tokens = {
        "large norms": "large", "common mean": "common mean", "sinks": "sinks", "ones": "normed",
        "saturated dropout": d.pick("large", "clusters", "one large", "large"),
        "tokens": d.pick(*values.TOKENS),
    }.get(what) or (d.pick(*values.TOKENS) if d.chance(0.25) else "randn")  # fmt: skip
    mask = packed = False
    if what == "packed" or (what not in ("padding", "far padding") and d.chance(0.12)):
        packed = True
        sizes_, offsets, longest = packed_tokens(d, tokens, shape, scale)
    else:
        sizes_ = shape
        values.tokens(d, tokens, shape, scale)
        if seqlen and (what in ("padding", "far padding") or d.chance(0.15)):
            mask = True
            values.mask(d, batch, seqlen)
            if what == "far padding":
                values.far(d)
        if not mask:
            values.undefined(d, d.integer(0, max(batch - 1, 0)), batch)
    laid = values.layout(d, "w", sizes_, dtype, None if what == "layout" or d.chance(0.5) else "projection", True)
    lse = phi not in ("relu", "identity") and (what == "lse" or d.chance(0.35))
    working = dtype
    if dtype != "float64" and (what == "autocast" or d.chance(0.03)):
        call.working = working = d.half(backend)
        call.context = f'torch.autocast("cpu", torch.{working})'
    call.outputs = ("out", "lse") if lse else ("out",)
    rows = (nheads, sizes_[0]) if packed else shape[:3]
    exact = "float64" if dtype == "float64" else "float32"
    call.wrt = ["w"]
    call.upstream = upstreams(d, call.outputs, {"out": sizes_, "lse": rows}, {"out": working, "lse": exact}, what)
    options = keywords(
        causal=causal or None, scale=scale, dropout_p=dropout or None, phi=None if phi == "softmax" else repr(phi),
        threshold=threshold, key_padding_mask="mask" if mask else None, cu_seqlens="bounds" if packed else None,
        max_seqlen=longest if packed else None, return_lse=True if lse else None,
        backend=repr(backend) if backend else None,
    )  # fmt: skip
    call.line = f"{', '.join(call.outputs)} = mssa(w{options})"
    call.merged = not packed and merges(backend, laid, dtype)
    modes(d, call, what, 0 if packed else batch * nheads, causal and not packed and seqlen > 1)
    plain = phi in ("relu", "identity")
    if backend in KERNELS and (working == "float64" or plain or head_dim > 256):
        call.refusal = NotImplementedError, "backend="
    call.lenient = call.lenient or plain  # raw scores may overflow in the tokens' dtype
    call.jumps = phi in ("threshold", "relu")
    factor = scale if scale is not None else head_dim**-0.5
    lacking = not has_cpp() or working == "float64" or plain or (phi == "threshold" and head_dim > 64)
    native = backend == "composite" or (backend is None and lacking)

    def equation(t, nudge):
        w, seed_ = t["w"], t["seed"]

        def dense(w, index):
            drop = None
            if dropout and native:
                drop = sdpa_factor(w.shape, working, dropout)
            elif dropout:
                drop = philox.attention_factor(seed_, dropout, index, w.shape)
            options = {"causal": causal, "scale": factor, "factor": drop, "phi": phi, "threshold": threshold}
            return oracle.mssa(w, **options, mask=t.get("mask"), nudge=nudge)

        return dict(zip(("out", "lse"), oracle.per_sequence(dense, w, offsets) if packed else dense(w, 0), strict=True))

    call.equation, call.setup = equation, d.lines
    return call
