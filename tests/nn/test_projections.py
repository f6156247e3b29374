"""Modules that apply the transpose of their projection: what the projection applies, not what its weight holds."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.testing import assert_close

from crate_kernels.models.crate import RateGradientStep
from crate_kernels.nn import MSSA, CausalMSSA, CausalTSSA, _heads
from tests.nn.adapters import LowRank, quantised
from tests.nn.test_nn import DIM, HEAD_DIM, HEADS, built, tokens

TIED = {
    "mssa": lambda: MSSA(DIM, HEADS, HEAD_DIM, tied=True, gamma=0.7),
    "gradient": lambda: RateGradientStep(DIM, HEADS, HEAD_DIM, gamma=0.4),
}
each_tied = pytest.mark.parametrize("make", TIED.values(), ids=TIED)


def merged(module):
    other = copy.deepcopy(module)
    other.qkv = module.qkv.merged()
    return other


def gradients(module, x, names):
    x = x.clone().requires_grad_()
    out = module(x)
    out.square().sum().backward()
    return [out, x.grad, *(dict(module.named_parameters())[name].grad for name in names)]


@each_tied
def test_an_adapter_is_transposed_too(make):
    module = built(make())
    module.qkv = LowRank(module.qkv)
    actual = gradients(module, tokens(), ("qkv.base_layer.weight", "qkv.A", "qkv.B"))
    *expected, whole = gradients(merged(module), tokens(), ("qkv.weight",))
    assert_close(actual, [*expected, whole, module.qkv.B.T @ whole, whole @ module.qkv.A.T])


@each_tied
def test_an_adapter_with_a_bias_is_transposed_without_it(make):
    module = built(make())
    module.qkv = LowRank(module.qkv, bias=True)
    assert_close(_heads.weight_of(module.qkv, tokens()), module.qkv.merged().weight)


@each_tied
def test_an_adapter_in_bfloat16_and_under_autocast(make):
    module = built(make()).float()
    module.qkv = LowRank(module.qkv)
    x = tokens(dtype=torch.float32)
    expected = merged(module)(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert (module(x).float() - expected).norm() < 0.05 * expected.norm()
    out = module.bfloat16()(x.bfloat16())
    assert out.dtype == torch.bfloat16
    assert (out.float() - expected).norm() < 0.05 * expected.norm()


@each_tied
def test_weights_that_wait_elsewhere_are_fetched(make):
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate: the extra hf")
    module = built(make())
    away = accelerate.cpu_offload(copy.deepcopy(module), torch.device("cpu"))
    assert away.qkv.weight.is_meta
    with torch.no_grad():
        assert_close(away(tokens()), module(tokens()))


@each_tied
def test_a_quantised_projection_is_transposed_as_it_is(make):
    module = built(make()).float()
    module = quantised(nn.Sequential(module))[0]
    stored = module.qkv.weight().dequantize()
    x = tokens(dtype=torch.float32)
    assert_close(_heads.weight_of(module.qkv, x), stored, rtol=0, atol=1e-6)
    assert module(x).isfinite().all()


class Wrapper(torch.Tensor):
    """A weight that a linear layer takes and a plain product does not, as quantised weights are."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            return function(args[0], args[1].inner, *args[2:], **(kwargs or {}))
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return Wrapper(args[0].inner)
        raise NotImplementedError(f"{function}")


@each_tied
def test_a_wrapped_weight_is_transposed_by_its_own_product(make):
    module = built(make())
    expected = module(tokens())
    module.qkv.weight = nn.Parameter(Wrapper(module.qkv.weight.detach()), requires_grad=False)
    assert_close(module(tokens()), expected)


COMPUTED = {
    "weight-norm": parametrizations.weight_norm,
    "pruned": lambda layer: prune.random_unstructured(layer, "weight", 0.5),
}


@pytest.mark.parametrize("compute", COMPUTED.values(), ids=COMPUTED)
@each_tied
def test_a_computed_weight_is_read_once_it_is_computed(make, compute):
    module = built(make())
    torch.manual_seed(0)
    compute(module.qkv)
    plain = make().double()
    plain.qkv.weight = nn.Parameter(module.qkv.weight.detach().clone())
    assert_close(module(tokens()), plain(tokens()))


@each_tied
@pytest.mark.parametrize("adapted", [False, True])
def test_hooks_see_the_tokens_alone(make, adapted):
    """Analyses record what a projection makes; a linear layer is asked for its weight without any product."""
    module, seen, asked = built(make()), [], []
    if adapted:
        module.qkv = LowRank(module.qkv)
    (module.qkv.base_layer if adapted else module.qkv).register_forward_pre_hook(lambda *_: asked.append(1))
    module.qkv.register_forward_hook(lambda _, args, out: seen.append(args[0].shape))
    module(tokens())
    assert (seen, len(asked)) == ([tokens().shape], 1 + adapted)


@each_tied
@pytest.mark.parametrize("adapted", [False, True])
def test_it_is_compiled_whole(make, adapted):
    module = built(make())
    if adapted:
        module.qkv = LowRank(module.qkv)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_close(compiled(tokens()), module(tokens()))


CACHED = {
    "mssa": lambda: MSSA(DIM, HEADS, HEAD_DIM, causal=True),
    "causal-mssa": lambda: CausalMSSA(DIM, HEADS),
    "causal-tssa": lambda: CausalTSSA(DIM, HEADS, 9),
}
WAITING = {
    "adapted": lambda module: _adapted(module),
    "quantised": lambda module: quantised(nn.Sequential(module))[0],
    "offloaded": lambda module: pytest.importorskip("accelerate", reason="needs accelerate: the extra hf").cpu_offload(
        module, torch.device("cpu")
    ),
}


def _adapted(module):
    name = "qkv" if hasattr(module, "qkv") else "c_attn"
    module.set_submodule(name, LowRank(module.get_submodule(name)))
    return module


@pytest.mark.parametrize("wrap", WAITING.values(), ids=WAITING)
@pytest.mark.parametrize("make", CACHED.values(), ids=CACHED)
def test_caches_are_where_the_projection_runs(make, wrap):
    module = wrap(built(make()).float())
    x = tokens(dtype=torch.float32)
    with torch.no_grad():
        cache = module.new_cache(2, 9)
        parts = [module(part, cache=cache) for part in x.split([4, 3], 1)]
        # Activations are quantised by what a call holds, so steps differ from the whole.
        tolerance = {"rtol": 0.1, "atol": 0.3} if wrap is WAITING["quantised"] else {}
        assert_close(torch.cat(parts, 1), module(x), **tolerance)
