"""Source lines for tensors: values that kernels find hard, masks, packings, and every kind of strides."""

TOKENS = (
    "randn", "randn", "randn", "large", "zeros", "zero tokens", "zero channel", "zero head", "one-hot", "tiny",
    "mixed norms", "same", "common mean", "clusters", "one large",
)  # fmt: skip


def tokens(d, kind, shape, scale=None):
    """Write ``w``, float32 tokens of one kind; shape is (batch, nheads, seqlen, head_dim)."""
    batch, nheads, seqlen, head_dim = shape
    factor = d.pick(0.1, 0.5, 1.0, 1.0, 2.0)
    if kind == "large":
        factor = d.pick(5.0, 10.0, 30.0)
    if kind == "tiny":
        factor = d.pick(1e-2, 1e-4, 1e-6, 3e-12, 2e-13)
    if kind == "sinks":
        factor = d.pick(0.1, 0.3, 1.0, 1.0)  # the others attend to the long tokens in part, or not at all
    d.put(f"w = torch.randn({batch}, {nheads}, {seqlen}, {head_dim}, generator=g) * {factor}")
    if kind == "zeros":
        d.put("w = w * 0")
    elif kind == "zero tokens":
        d.put(f"w[:, :, ::{d.integer(1, 3)}] = 0" if d.chance(0.5) else f"w[:, :, :{d.integer(1, 5)}] = 0")
    elif kind == "zero channel":
        d.put(f"w[..., ::{d.integer(1, 4)}] = 0")
    elif kind == "zero head":
        d.put("w[:, 0] = 0")
    elif kind == "one-hot":
        d.put(f"w = torch.eye({head_dim})[torch.randint({head_dim}, w.shape[:3], generator=g)] * {factor}")
    elif kind == "mixed norms":
        spread = d.pick(1.0, 1.5)
        axes = d.pick("w[:, :, :, :1]", "w[:, :, :, :1]", "w[:, :, :1]", "w[:, :1]")
        d.put(f"w = w * 10 ** (torch.rand({axes}.shape, generator=g) * {2 * spread} - {spread})")
    elif kind == "same":
        d.put("w[:, :, 1:] = w[:, :, :1]")
    elif kind == "common mean":
        # Scores of a token with itself, in nats, near which the softmax's bounds begin to round.
        nats = d.uniform(100, 3500)
        size = (nats / (abs(scale) if scale else head_dim**-0.5)) ** 0.5
        d.put(f"m = torch.nn.functional.normalize(torch.randn(1, {nheads}, 1, {head_dim}, generator=g), dim=-1)")
        d.put(f"w = w * {d.pick(0.03, 0.3, 1.0)} + m * {size:.4g}")
    elif kind == "clusters":
        d.put(f"w = w * 0.1; w[..., 0] += {d.pick(3.0, 20.0)} * (torch.randint(2, w.shape[:3], generator=g) * 2 - 1)")
    elif kind == "one large":
        d.put(f"w[:, :, {d.integer(0, max(seqlen - 1, 0))}:][:, :, :1] *= {d.pick(10.0, 30.0)}")
    elif kind == "sinks":
        place, count = d.pick(0, 0, d.integer(0, max(seqlen - 1, 0))), d.pick(1, 1, 2)
        d.put(f"w[:, :, {place}:{place + count}] *= {d.uniform(10, 100)}")
        if d.chance(0.3):  # all others look at it
            d.put(f"w = torch.where(w.abs() > 10, w, w + {d.uniform(0.003, 0.03)} * w[:, :, {place}:{place + 1}])")
    elif kind == "normed":
        d.put(f"w = torch.nn.functional.layer_norm(w, ({head_dim},))")
    elif kind == "drifting":
        first, last = d.pick((0.0, 1.0), (-1.0, 1.0), (1.0, 0.0), (0.01, 1.0))
        d.put(f"m = torch.nn.functional.normalize(torch.randn(1, {nheads}, 1, {head_dim}, generator=g), dim=-1)")
        d.put(f"w = w + m * {d.pick(3.0, 10.0, 30.0)} * torch.linspace({first}, {last}, {seqlen})[:, None]")
    return kind


def far(d):
    """Move padded tokens far from every kept key, or far out: their scores may decide only their own rows."""
    d.put(f"w[..., 0] += torch.where(mask, {d.uniform(0, 30)}, {d.uniform(-60, 60)})[:, None]")


def undefined(d, dims, count):
    """Give one of ``count`` sequences tokens that are no numbers, which no other may see."""
    if count > 1 and d.chance(0.04):
        d.put(f"w[{dims}] = {d.pick('math.nan', 'math.inf')}")


def layout(d, name, sizes, dtype, kind=None, requires_grad=False, between="math.nan"):
    """Rewrite tensor ``name`` in ``dtype`` with drawn strides; what lies ``between`` its elements is not to be read."""
    n = len(sizes)
    kind = kind or d.pick("contiguous", "permuted", "permuted", "sliced", "padded", "offset", "expanded", "projection")
    end = ".requires_grad_()" if requires_grad else ""
    full = f"torch.full({{}}, {between}, dtype=torch.{dtype})"
    if kind == "projection" and n == 4:
        b, h, s, c = sizes
        parts = d.integer(1, 3)
        part = d.integer(0, parts - 1)
        d.put(f"{name} = {full.format((b, s, parts, h, c))}[:, :, {part}].transpose(1, 2).copy_({name}){end}")
    elif kind == "permuted" and n > 1:
        order = list(range(n))
        d.random.shuffle(order)
        back = tuple(order.index(i) for i in range(n))
        d.put(f"{name} = {full.format(tuple(sizes[i] for i in order))}.permute{back}.copy_({name}){end}")
    elif kind == "sliced":
        axis, step = d.integer(0, n - 1), d.integer(2, 3)
        wide = tuple(size * step if i == axis else size for i, size in enumerate(sizes))
        cut = ", ".join(f"::{step}" if i == axis else ":" for i in range(n))
        d.put(f"{name} = {full.format(wide)}[{cut}].copy_({name}){end}")
    elif kind == "padded":
        before = [d.integer(0, 2) for _ in sizes]
        wide = tuple(size + k + d.integer(0, 2) for size, k in zip(sizes, before, strict=True))
        cut = ", ".join(f"{k}:{k + size}" for k, size in zip(before, sizes, strict=True))
        d.put(f"{name} = {full.format(wide)}[{cut}].copy_({name}){end}")
    elif kind == "offset":
        k = d.integer(1, 7)
        count = 1
        for size in sizes:
            count *= size
        d.put(f"{name} = {full.format((count + k,))}[{k}:].view{tuple(sizes)}.copy_({name}){end}")
    elif kind == "expanded":
        axis = d.integer(0, n - 1)
        d.put(f"{name} = {name}.to(torch.{dtype}).narrow({axis}, 0, {min(1, sizes[axis])}).expand{tuple(sizes)}{end}")
    else:
        d.put(f"{name} = {name}.to(torch.{dtype}){end}")
    return kind


def upstream(d, name, sizes, dtype, between="math.nan", kind=""):
    """Write an upstream gradient, as a loss may give it: dense, permuted, or one number expanded; "ones" of a sum."""
    if kind == "ones":
        size, row = 1, f"torch.randn({sizes[-1]}, generator=g).to(torch.{dtype})"
        for each in sizes:
            size *= max(each, 1)
        d.put(f"{name} = " + d.pick(  # of a sum, of a mean, of tokens that are added up
            f"torch.ones((), dtype=torch.{dtype}).expand{tuple(sizes)}",
            f"torch.ones({tuple(sizes)}, dtype=torch.{dtype})",
            f"torch.full((), {1 / size:.3g}, dtype=torch.{dtype}).expand{tuple(sizes)}",
            f"{row}.expand{tuple(sizes)}",
        ))  # fmt: skip
        return
    factor = d.pick(1.0, 1.0, 1.0, 30.0, 1e-3)
    if d.chance(0.15):
        d.put(f"{name} = torch.full((), {factor}, dtype=torch.{dtype}).expand{tuple(sizes)}")
        return
    d.put(f"{name} = torch.randn({tuple(sizes)}, generator=g) * {factor}")
    kind = d.pick("contiguous", "contiguous", "permuted", "sliced", "projection", "expanded")
    layout(d, name, sizes, dtype, kind, between=between)


def mask(d, batch, seqlen):
    """Write ``mask``, (batch, seqlen) bool with drawn strides, True = keep."""
    kind = d.pick("right", "right", "left", "scattered", "one", "all", "none", "none in a row", "expanded")
    places = f"torch.arange({seqlen})"
    if kind in ("right", "left"):
        d.put(f"lengths = torch.randint({seqlen + 1}, ({batch}, 1), generator=g)")
        d.put(f"mask = {places} < lengths" if kind == "right" else f"mask = {places} >= {seqlen} - lengths")
    elif kind == "one":
        d.put(f"mask = {places} == torch.randint({seqlen}, ({batch}, 1), generator=g)")
    elif kind in ("all", "none"):
        d.put(f"mask = torch.{'ones' if kind == 'all' else 'zeros'}({batch}, {seqlen}, dtype=torch.bool)")
    elif kind == "expanded":
        d.put(f"mask = (torch.rand(1, {seqlen}, generator=g) < 0.6).expand({batch}, {seqlen})")
        return
    else:
        d.put(f"mask = torch.rand({batch}, {seqlen}, generator=g) < {d.pick(0.2, 0.5, 0.9)}")
        if kind == "none in a row" and batch:
            d.put(f"mask[{d.integer(0, batch - 1)}] = False")
    stride(d, "mask", (batch, seqlen), "bool", "True")


def stride(d, name, sizes, dtype, between):
    """Rewrite an index or mask tensor with drawn strides; what lies between its elements would be wrong to read."""
    kind = d.pick("contiguous", "column", "sliced", "offset")
    full = f"torch.full({{}}, {between}, dtype=torch.{dtype})"
    if kind == "column":
        d.put(f"{name} = {full.format((*sizes, d.integer(2, 3)))}[..., {d.integer(0, 1)}].copy_({name})")
    elif kind == "sliced":
        if len(sizes) == 2:
            d.put(f"{name} = {full.format(sizes[::-1])}.t().copy_({name})")
        else:
            d.put(f"{name} = {full.format((2 * sizes[0],))}[::2].copy_({name})")
    elif kind == "offset":
        wide = (*sizes[:-1], sizes[-1] + 3)
        d.put(f"{name} = {full.format(wide)}[..., 1:{sizes[-1] + 1}].copy_({name})")


def packing(d, longest):
    """Write ``bounds``, int32 offsets with drawn strides; return the lengths of the sequences and a max_seqlen."""
    count = d.pick(1, 1, 2, 3, d.integer(1, 7))
    lengths = [d.pick(0, 1, d.integer(0, longest), d.integer(1, longest), longest) for _ in range(count)]
    if sum(lengths) == 0 and d.chance(0.8):
        lengths[-1] = longest
    offsets = [sum(lengths[:i]) for i in range(count + 1)]
    d.put(f"bounds = torch.tensor({offsets}, dtype=torch.int32)")
    stride(d, "bounds", (count + 1,), "int32", "-7")
    return offsets, max(lengths) + d.pick(0, 0, 0, 1, d.integer(1, 100))
