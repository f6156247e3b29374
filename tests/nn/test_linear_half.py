"""Linear layers in 16 bits: which processors multiply them in float32, and from how many rows on."""

import copy

import pytest
import torch

from crate_kernels._core import products
from tests.nn.linear import IN, OUT, SHAPES, check, needs_onednn, pair

pytestmark = needs_onednn


@pytest.fixture
def no_half(monkeypatch):
    """Take the way of a processor without arithmetic in 16 bits, for matrices of any size."""
    monkeypatch.setattr(
        products, "_slow", dict.fromkeys((torch.bfloat16, torch.float16), products.Fp32Fallback(1, 1, 1))
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_16_bits_are_multiplied_in_float32_and_rounded_once(no_half, shape, bias, dtype):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    ours, plain = pair(bias, dtype=dtype)
    check(ours, plain, x)
    exact = copy.deepcopy(plain).float()(x.float())
    assert torch.equal(ours(x), exact.to(dtype))
    assert ours(x).dtype == dtype


@pytest.mark.parametrize(
    ("fallback", "rows", "min_rows_large"),
    [(products.NUMBER_BY_NUMBER, 8, 32), (products.HALF_RATE, 64, 64)],
    ids=["number-by-number", "half-rate"],
)
def test_few_rows_of_16_bits_are_not_converted(fallback, rows, min_rows_large, monkeypatch):
    monkeypatch.setattr(products, "_slow", {torch.bfloat16: fallback})
    right, tokens = torch.randn(OUT, IN, dtype=torch.bfloat16), torch.randn(64, IN, dtype=torch.bfloat16)
    assert not products.should_reroute(tokens[: rows - 1], right)
    assert products.should_reroute(tokens[:rows], right)
    assert not products.should_reroute(tokens[:rows], right.float())
    monkeypatch.setattr(products, "_LARGE", OUT * IN)
    assert not products.should_reroute(tokens[: min_rows_large - 1], right)
    assert products.should_reroute(tokens[:min_rows_large], right)


@pytest.mark.parametrize(
    ("fallback", "rows"),
    [(products.NUMBER_BY_NUMBER, 1), (products.HALF_RATE, 64)],
    ids=["number-by-number", "half-rate"],
)
def test_an_operator_converts_from_its_own_number_of_rows(fallback, rows, monkeypatch):
    monkeypatch.setattr(products, "_slow", {torch.bfloat16: fallback})
    assert products.fast_dtype(torch.bfloat16, rows) == torch.float32
    assert products.fast_dtype(torch.bfloat16, rows - 1) == torch.bfloat16
    assert products.fast_dtype(torch.float16, rows) == torch.float16


@pytest.mark.parametrize(
    "shape", [(19, IN), (2, 8, IN), (2, 9, IN)], ids=["a-rest", "whole-parts", "batches-and-a-rest"]
)
def test_many_rows_of_16_bits_are_converted_in_parts(no_half, shape, monkeypatch):
    monkeypatch.setattr(products, "_AT_ONCE", 4)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    ours, plain = pair(dtype=torch.bfloat16)
    check(ours, plain, x)
    assert torch.equal(ours(x), copy.deepcopy(plain).float()(x.float()).to(torch.bfloat16))


SAID = {
    "linux": ("vendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\n", 25),
    "windows": ("AMD64 Family 26 Model 2 Stepping 1, AuthenticAMD", 26),
    "unknown": ("arm", 0),
}


@pytest.mark.parametrize(("said", "family"), SAID.values(), ids=SAID)
def test_the_family_of_a_processor(said, family, monkeypatch):
    monkeypatch.setattr(products, "_processor", lambda: said)
    assert products._family() == family
    assert products._is_made_by("AuthenticAMD") == (family > 0)


def test_where_linux_says_nothing_python_is_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(products, "Path", lambda path: tmp_path / "none")
    monkeypatch.setattr(products.platform, "processor", lambda: "AMD64 Family 26, AuthenticAMD")
    assert products._processor.__wrapped__() == "AMD64 Family 26, AuthenticAMD"


@pytest.mark.parametrize("bfloat16", [True, False])
@pytest.mark.parametrize("float16", [True, False])
@pytest.mark.parametrize("onednn", [True, False])
def test_dtypes_that_are_multiplied_number_by_number(onednn, bfloat16, float16, monkeypatch):
    monkeypatch.setattr(products, "_HAS_ONEDNN", onednn)
    monkeypatch.setattr(products, "_is_made_by", lambda vendor: False)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: bfloat16)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: float16)
    fast = {torch.bfloat16: onednn and bfloat16, torch.float16: onednn and float16}
    assert products._fallbacks() == {dtype: products.NUMBER_BY_NUMBER for dtype in fast if not fast[dtype]}


VENDORS = {"intel": "GenuineIntel", "amd": "AuthenticAMD"}


@pytest.mark.parametrize("amx", [True, False], ids=["amx", "no-amx"])
@pytest.mark.parametrize("vendor", VENDORS.values(), ids=VENDORS)
def test_bfloat16_takes_the_detour_on_intel_without_amx(vendor, amx, monkeypatch):
    monkeypatch.setattr(products, "_HAS_ONEDNN", True)
    monkeypatch.setattr(products, "_is_made_by", vendor.__eq__)
    for name, has in {"_is_avx512_bf16_supported": True, "_is_amx_tile_supported": amx}.items():
        monkeypatch.setattr(torch.cpu, name, lambda has=has: has)
    for name in ("_is_mkldnn_bf16_supported", "_is_mkldnn_fp16_supported"):
        monkeypatch.setattr(torch.ops.mkldnn, name, lambda: True)
    assert products._fallbacks() == (
        {torch.bfloat16: products.HALF_RATE} if vendor == VENDORS["intel"] and not amx else {}
    )


def test_a_processor_that_multiplies_16_bits_is_left_to_it(monkeypatch):
    monkeypatch.setattr(products, "_slow", {})
    x = torch.randn(65, IN, dtype=torch.bfloat16)
    ours, plain = pair(dtype=torch.bfloat16)
    assert torch.equal(ours(x), plain(x))
    assert products.fast_dtype(torch.bfloat16, 65) == torch.bfloat16


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_a_bias_in_bfloat16_is_not_copied_first(taken, bias, monkeypatch):
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("needs a processor on which oneDNN multiplies bfloat16")
    monkeypatch.setattr(products, "_slow", {})
    x = torch.randn(2, 65, IN, generator=torch.Generator().manual_seed(1), dtype=torch.bfloat16)
    check(*pair(bias, dtype=torch.bfloat16), x)
    assert len(taken) == bias  # neither gradient has a bias
    half, ones = pair(dtype=torch.bfloat16)[0].linear.weight[:, ::2], torch.ones(OUT, dtype=torch.bfloat16)
    assert products.should_reroute(x[..., ::2].contiguous(), half, ones)
    assert not products.should_reroute(x[..., ::2], half, ones), "oneDNN would copy it"
