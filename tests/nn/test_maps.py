"""Feature maps (batch, channels, height, width): as the users' own blocks flatten and reshape them."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from crate_kernels.nn import ISTA, MSSA, TSSA, OvercompleteISTA
from tests.nn.test_nn import DIM, HEADS, built, tokens

BATCH, HEIGHT, WIDTH = 2, 3, 5


def flat(x):
    return x.flatten(2).permute(0, 2, 1)


def back(out):
    return out.permute(0, 2, 1).view(-1, out.shape[2], HEIGHT, WIDTH)


def mssa(module, x):
    w = module.qkv(flat(x)).view(BATCH, -1, HEADS, 4).transpose(1, 2)
    out = F.softmax(w @ w.transpose(-1, -2) * 4**-0.5, dim=-1) @ w
    return back(module.to_out(out.transpose(1, 2).reshape(BATCH, -1, HEADS * 4)))


def tssa(module, x):
    w = module.qkv(flat(x)).view(BATCH, -1, HEADS, 4).transpose(1, 2)
    pi = F.softmax(F.normalize(w, dim=-2).square().sum(-1) * module.temp, dim=1)
    dots = (pi / (pi.sum(-1, keepdim=True) + 1e-8)).unsqueeze(-2) @ w**2
    out = -(w * pi.unsqueeze(-1)) * (1.0 / (1 + dots))
    return back(module.to_out(out.transpose(1, 2).reshape(BATCH, -1, DIM)))


def ista(module, x):
    d = module.weight[:, :, None, None]  # 1x1 convolutions of the map
    residual = x - F.conv2d(x, d)
    return F.relu(x + 0.1 * F.conv2d(residual, d.transpose(0, 1)) - 0.1 * 0.1)


def overcomplete(module, x):
    t, code = flat(x), 0.0
    for _ in range(2):
        residual = t - code @ module.D.t() if torch.is_tensor(code) else t
        code = F.relu(code + 0.1 * residual @ module.D - 0.1 * 0.1)
    return back(code @ module.D1.t())


MAPS = {
    "mssa": (lambda **k: MSSA(DIM, HEADS, 4, **k), mssa),
    "tssa": (lambda **k: TSSA(DIM, HEADS, **k), tssa),
    "ista": (lambda **k: ISTA(DIM, **k), ista),
    "overcomplete": (lambda **k: OvercompleteISTA(DIM, **k), overcomplete),
}
each_module = pytest.mark.parametrize(("make", "formula"), MAPS.values(), ids=MAPS)


def feature_map(memory_format=torch.contiguous_format):
    return tokens(BATCH, DIM, HEIGHT, WIDTH).contiguous(memory_format=memory_format).requires_grad_()


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@each_module
def test_a_map_is_its_pixels(make, formula, memory):
    module, results = built(make(data_format="channels_first")), []
    for function in (module, lambda x: formula(module, x)):
        module.zero_grad()
        x = feature_map(memory)
        out = function(x)
        (out * tokens(*out.shape).cos()).sum().backward()
        results.append([out, x.grad, *(p.grad for p in module.parameters())])
    assert_close(*results)


@each_module
def test_a_map_with_channels_last_is_not_copied(make, formula, monkeypatch):
    module, x = built(make(data_format="channels_first")), feature_map(torch.channels_last).detach()
    seen = []
    for name in ("ista", "ista_overcomplete"):
        operator = getattr(__import__("crate_kernels.nn.sparse", fromlist=[name]), name)
        monkeypatch.setattr(
            f"crate_kernels.nn.sparse.{name}",
            lambda t, *a, operator=operator, **k: seen.append(t) or operator(t, *a, **k),
        )
    if hasattr(module, "qkv"):
        module.qkv.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    out = module(x)
    assert [(t.data_ptr(), t.shape, t.is_contiguous()) for t in seen] == [
        (x.data_ptr(), (BATCH, HEIGHT * WIDTH, DIM), True)
    ]
    assert out.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", ["mssa", "tssa"])
def test_a_mask_of_pixels(name):
    module = built(MAPS[name][0](data_format="channels_first"))
    plain = built(MAPS[name][0]())
    keep = torch.rand(BATCH, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(3)) < 0.6
    x = feature_map()
    assert_close(module(x, key_padding_mask=keep), back(plain(flat(x), key_padding_mask=keep.flatten(1))))
    with pytest.raises(
        ValueError, match=r"key_padding_mask must be \(batch, height, width\) = \(2, 3, 5\), got \(2, 15\)"
    ):
        module(x, key_padding_mask=keep.flatten(1))


def test_what_mssa_returns_beside_its_output():
    module, x = built(MSSA(DIM, HEADS, 4, data_format="channels_first")), feature_map()
    assert_close(module(x, return_key=True), back(module.qkv(flat(x))))
    assert module(x, return_attention=True).shape == (BATCH, HEADS, 15, 15)


@each_module
def test_maps_compile_in_one_graph(make, formula):
    module, x = built(make(data_format="channels_first")), feature_map()
    assert_close(torch.compile(module, fullgraph=True, backend="aot_eager")(x), module(x))


BAD = {
    "tokens-mssa": (
        lambda: MSSA(DIM, data_format="channels_first")(tokens()),
        r"MSSA: x must be .*dim=12, height, wid",
    ),
    "tokens-ista": (
        lambda: ISTA(DIM, data_format="channels_first")(tokens()),
        r"ISTA: x must be .*dim=12, height, wid",
    ),
    "map-ista": (lambda: ISTA(DIM)(feature_map()), r"ISTA: x must be .*: maps .* need data_format='channels_first'"),
    "map-codes": (
        lambda: OvercompleteISTA(DIM)(feature_map()),
        r"OvercompleteISTA: .* need data_format='channels_first'",
    ),
    "map-tssa": (lambda: TSSA(DIM, 3)(feature_map()), r"TSSA: x must be .*: maps .* need data_format='channels_first'"),
    "channels": (
        lambda: OvercompleteISTA(DIM, data_format="channels_first")(torch.ones(1, 3, 12, 12)),
        r"OvercompleteISTA: x must be \(batch, dim=12, height, width\), got \(1, 3, 12, 12\)",
    ),
    "format": (
        lambda: TSSA(DIM, 3, data_format="NCHW"),
        "TSSA: data_format must be 'channels_last' or 'channels_first'",
    ),
    "cache": (
        lambda: (m := MSSA(DIM, 3, 4, causal=True, data_format="channels_first"))(
            torch.ones(1, DIM, 2, 2), cache=m.new_cache(1, 4)
        ),
        "MSSA: x must be tokens with a cache or cu_seqlens, got a feature map",
    ),
}


@pytest.mark.parametrize(("call", "message"), BAD.values(), ids=BAD)
def test_bad_maps(call, message):
    with pytest.raises(ValueError, match=message):
        call()
