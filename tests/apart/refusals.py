"""Calls with one argument that cannot be: an error of a documented type that begins with the operator's name."""

from tests.apart.call import DrawnCall
from tests.apart.judge import Refused
from tests.apart.tolerance import Wrong, check, same

_SETUP = """
w = torch.randn(2, 3, 8, 16, generator=g)
packed = torch.randn(10, 3, 16, generator=g)
bounds = torch.tensor([0, 4, 10], dtype=torch.int32)
keep = torch.arange(8) < torch.tensor([[8], [5]])
temp, bias = torch.ones(3), torch.zeros(3, 8, 1)
x, weight, wide = torch.randn(2, 8, 16, generator=g), torch.eye(16), torch.ones(16, 24)
cache, stats = SubspaceCache(2, 3, 12, 16), TokenStatsCache(2, 3, 16)
"""
# Arguments of which one is wrong, per call.
WRONG = {
    "mssa({})": """
        w.int(); w.to(torch.complex64); w > 0; w[0]; w[None]; w.tolist(); None; w, causal=1; w, causal=None; w,
        scale=math.nan; w, scale=math.inf; w, scale='1'; w, scale=True; w, scale=torch.tensor(0.5); w, dropout_p=1.0;
        w, dropout_p=-0.1; w, dropout_p=math.nan; w, dropout_p='0.5'; w, dropout_p=None; w, phi='gelu'; w, phi=None;
        w, phi=3; w, phi='threshold'; w, threshold=0.5; w, phi='threshold', threshold=-1.0; w, phi='threshold',
        threshold=math.nan; w, phi='relu', return_lse=True; w, phi=['softmax']; w, key_padding_mask=keep.float(); w,
        key_padding_mask=keep[:1]; w, key_padding_mask=keep[0]; w, key_padding_mask=keep.tolist(); w,
        key_padding_mask=keep[:, :, None]; w, max_seqlen=8; w, return_lse=1; w, cache=stats, causal=True; w, cache={},
        causal=True; w, cache=cache; w, cache=cache, causal=True, dropout_p=0.1; w.double(), cache=cache, causal=True;
        w[:1], cache=cache, causal=True; w[:, :2], cache=cache, causal=True; w[..., :8], cache=cache, causal=True;
        w.requires_grad_(), cache=cache, causal=True; w, cache=cache, causal=True, phi='relu'; w, cache=cache,
        causal=True, key_padding_mask=keep.flip(1); w.repeat(1, 1, 2, 1), cache=cache, causal=True; packed,
        cu_seqlens=bounds; packed, cu_seqlens=bounds.long(), max_seqlen=6; packed, cu_seqlens=bounds, max_seqlen=5;
        packed, cu_seqlens=bounds, max_seqlen=6.0; packed, cu_seqlens=bounds, max_seqlen=True; packed,
        cu_seqlens=bounds, max_seqlen=-1; packed, cu_seqlens=bounds[:1], max_seqlen=6; packed,
        cu_seqlens=bounds[None], max_seqlen=6; packed, cu_seqlens=[0, 4, 10], max_seqlen=6; packed, cu_seqlens=bounds
        + 1, max_seqlen=6; packed, cu_seqlens=bounds.flip(0), max_seqlen=6; packed, cu_seqlens=bounds[:2],
        max_seqlen=6; packed, cu_seqlens=bounds * 2, max_seqlen=20; packed, cu_seqlens=bounds - 4, max_seqlen=6;
        packed, cu_seqlens=bounds, max_seqlen=6, key_padding_mask=keep; packed; w, cu_seqlens=bounds, max_seqlen=6;
        packed, cu_seqlens=bounds, max_seqlen=6, cache=cache, causal=True; w[..., :0]; w, backend=5; w,
        backend='cuda'; w, backend=''; w, backend=b'cpp'
    """,
    "tssa({})": """
        w.int(), temp; w, None; w, temp.tolist(); w, temp[:2]; w, temp[None]; w, temp[:, None, None]; w, 1.0; w,
        temp.half(); w, temp.double(); w.half(), temp.bfloat16(); w, temp.long(); w, temp > 0; w, temp, causal=1; w,
        temp, dropout_p=1.0; w, temp, dropout_p=-1; w, temp, dropout_p=math.nan; w, temp, denom_bias=bias; w, temp,
        causal=True, denom_bias=bias[:, :7]; w, temp, causal=True, denom_bias=bias[:2]; w, temp, causal=True,
        denom_bias=bias[0]; w, temp, causal=True, denom_bias=bias.expand(3, 8, 2); w, temp, causal=True,
        denom_bias=bias.half(); w, temp, causal=True, denom_bias=bias.int(); w, temp, causal=True, denom_bias=0.0; w,
        temp, key_padding_mask=keep.int(); w, temp, key_padding_mask=keep.t(); w, temp, max_seqlen=8; w, temp,
        return_membership=None; w, temp, cache=cache, causal=True; w, temp, cache=stats; w, temp, cache=stats,
        causal=True, dropout_p=0.5; w.double(), temp.double(), cache=stats, causal=True; w[:1], temp, cache=stats,
        causal=True; w[..., 1:], temp, cache=stats, causal=True; w, temp.requires_grad_(), cache=stats, causal=True;
        w, temp, cache=stats, causal=True, key_padding_mask=keep.flip(1); packed, temp, cu_seqlens=bounds; packed,
        temp, cu_seqlens=bounds.long(), max_seqlen=6; packed, temp, cu_seqlens=bounds, max_seqlen=5; packed, temp,
        cu_seqlens=bounds - 1, max_seqlen=6; packed, temp; w, temp, backend=5; w, temp, backend='gpu'; w[:, :0],
        temp[:0]; w[..., :0], temp
    """,
    "ista({})": """
        x.int(), weight; x, weight.long(); x, weight > 0; x, weight.to(torch.complex64); x, weight.half(); x.half(),
        weight.bfloat16(); x, weight.double(); x, wide; x, weight[:8, :8]; x, weight[0]; x, weight[None]; x.sum(),
        weight; x[..., :8], weight; x, None; x.tolist(), weight; x, weight, lambd=-0.1; x, weight, lambd=math.nan; x,
        weight, lambd=None; x, weight, lambd=torch.tensor(1); x, weight, step_size=-0.1; x, weight,
        step_size=math.inf; x, weight, step_size='1'; x, weight, nonnegative=1; x, weight, nonnegative=None; x,
        weight, backend=5; x, weight, backend='amd'; x[..., :0], weight[:0, :0]
    """,
    "ista_overcomplete({})": """
        x, wide, steps=0; x, wide, steps=1.5; x, wide, steps=True; x, wide, steps=-1; x, wide, wide.t(); x, wide,
        wide[:, :8]; x, wide, wide.half(); x, wide, 3; x, wide.t(); x, wide.int(); x, wide > 0; x, wide, lambd=-1; x,
        wide, step_size=math.nan; x, wide, backend=5; x, wide[:, :0]; x[..., :0], wide[:0]
    """,
    "SubspaceCache({})": """
        0, 3, 8, 16; 2, 3, 8, -1; 2, 3, 8.0, 16; True, 3, 8, 16; 2, 3, 8, 16, dtype=torch.int32; 2, 3, 8, 16,
        dtype='float32'; 2, None, 8, 16; 2, 3, 0, 16
    """,
    "TokenStatsCache({})": """
        0, 3, 16; 2, 3.5, 16; 2, 3, 16, dtype=torch.int64; 2, 3, '16'
    """,
    "cache.truncate({})": """
        -1; 1.5; True; torch.tensor([1]); torch.tensor([1.0, 2.0]); None
    """,
    "cache.reorder({})": """
        torch.tensor([0]); torch.tensor([0.0, 1.0]); [0, 1]; torch.tensor([0, 2]); torch.tensor([0, -1]); None
    """,
    "stats.reorder({})": """
        torch.tensor([0]); torch.tensor([True, False]); [0, 1]; torch.tensor([0, 2]); torch.tensor([0, -1])
    """,
    "stats.truncate({})": """
        3; torch.tensor([0, 0]); None; -1
    """,
}
_EMPTY = ":0]"  # a size of 0 may be refused, or give an empty result


def draw(d, seed, kind, forced):
    """Draw one wrong call."""
    template = d.pick(*WRONG, "mssa({})", "mssa({})", "tssa({})", "ista({})")
    text = " ".join(d.pick(*WRONG[template].split(";")).split())
    backend, _ = d.backend(forced)
    name = template.split("(")[0]
    call = DrawnCall(kind, seed, name, backend if "." not in name and "Cache" not in name else None)
    backend_option = f", backend={backend!r}" if call.backend and "backend=" not in text else ""
    call.setup = [*d.lines, *_SETUP.split("\n")]
    call.line = f"out = {template.replace('{}', text + backend_option)}"
    call.check = follow
    return call


def follow(call, space):
    """Make the call; raise Refused if the error is a documented one."""
    names = ("w", "packed", "bounds", "keep", "temp", "bias", "x", "weight", "wide")
    names += tuple(f"cache.{name}" for name in ("data", "lengths"))
    names += tuple(f"stats.{name}" for name in ("energy", "weighted", "mass", "lengths"))
    before = {name: eval(name, space).detach().clone() for name in names}
    try:
        exec(call.line, space)
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        owner = {"cache.": "SubspaceCache.", "stats.": "TokenStatsCache."}.get(call.op[:6], "")
        begins = str(error).startswith((owner + call.op.rpartition(".")[2] + ":", "mssa:", "tssa:"))
        check(begins, f"{text!r} does not begin with {call.op}:")
        unavailable = type(error) is RuntimeError and ("is unavailable" in text or "takes cuda" in text)
        check(unavailable or type(error) in (TypeError, ValueError, NotImplementedError), text)
        for name, value in before.items():
            check(same(eval(name, space).detach(), value), f"{name} was written to")
        raise Refused(text) from error
    if _EMPTY in call.line:
        raise Refused("nothing: an empty result")
    raise Wrong("is accepted")
