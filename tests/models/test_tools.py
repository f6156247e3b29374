"""What PyTorch's tools make of our models: torch.fx, torch.jit.trace, quantize_dynamic, counters of FLOP, adapters."""

import pytest
import torch
import torch.ao.nn.quantized.dynamic as dynamic
from torch import fx, nn
from torch.utils.flop_counter import FlopCounterMode

from crate_kernels.models.aot import MHSA
from crate_kernels.models.crate import CRATE, CRATEConfig
from crate_kernels.nn import ISTA, TSSA, CausalMSSA, CausalTSSA, OvercompleteISTA
from tests.models.families import FAMILIES, build, drawn, inputs, output

VISION = ("crate", "crate_alpha", "crate_mae_encoder", "tost", "aot_vision")
CRATES = {
    attention: CRATEConfig(24, 2, 3, 8, 8, 4, num_classes=5, attention=attention) for attention in ("tied", "gradient")
}


def model_of(family):
    return drawn(CRATE(CRATES[family]) if family in CRATES else build(family)).eval()


def images_of(family):
    return (torch.randn(2, 3, 8, 8),) if family in CRATES else inputs(family)


def linear_layers(model):
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


@pytest.mark.parametrize("family", [*VISION, *CRATES])
def test_a_graph_of_fx_computes_and_learns_the_same(family):
    model, images = model_of(family), images_of(family)
    graph = fx.symbolic_trace(model)
    found, expected = graph(*images), model(*images)
    torch.testing.assert_close(found, expected)  # ToST turns its images, where they are no symbols
    assert graph(*(torch.cat([i, i]) for i in images)).shape[0] == 4
    parameters = [p for p in model.parameters() if p.requires_grad]
    grads = [torch.autograd.grad(out.sin().sum(), parameters, allow_unused=True) for out in (found, expected)]
    torch.testing.assert_close(*grads)
    kinds = {type(graph.get_submodule(node.target)) for node in graph.graph.nodes if node.op == "call_module"}
    assert any(kind.__module__.startswith("crate_kernels.") for kind in kinds)


ATTENTIONS = {
    "mssa": (lambda: build("crate").transformer.layers[0][0].fn, {"return_key": True}),
    "tssa": (lambda: TSSA(24, 3), {}),
    "causal-mssa": (lambda: CausalMSSA(24, 3), {}),
    "causal-tssa": (lambda: CausalTSSA(24, 3, 5), {}),
    "mhsa": (lambda: MHSA(24, 3), {}),
}


@pytest.mark.parametrize(("make", "options"), ATTENTIONS.values(), ids=ATTENTIONS)
def test_arguments_of_a_leaf_are_kept(make, options):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = drawn(make())

        def forward(self, x, keep):
            return self.attention(x, key_padding_mask=keep), self.attention(x, **options)

    masked, x = Masked().eval(), torch.randn(2, 5, 24)
    keep = torch.tensor([[True, True, True, False, False], [True] * 5])
    traced = fx.symbolic_trace(masked)
    assert {node.op for node in traced.graph.nodes} == {"placeholder", "call_module", "output"}
    torch.testing.assert_close(traced(x, keep), masked(x, keep), rtol=0, atol=0)


@pytest.mark.parametrize("family", ["crate_mae", "crate_lm", "tost_lm", "aot_lm", "aot_regression"])
def test_a_model_that_fx_cannot_trace_says_what_to_do(family):
    with pytest.raises(
        TypeError, match=f"^{type(build(family)).__name__}: torch.fx cannot trace .* use torch.export, or"
    ):
        fx.symbolic_trace(build(family))


LEAVES = {
    "attention": lambda: TSSA(24, 3),
    "causal": lambda: CausalMSSA(24, 3),
    "causal-statistics": lambda: CausalTSSA(24, 3, 5),
    "softmax": lambda: MHSA(24, 3),
    "step": lambda: ISTA(24),
    "map": lambda: OvercompleteISTA(24, 48, data_format="channels_first"),
}


@pytest.mark.parametrize("make", LEAVES.values(), ids=LEAVES)
def test_a_leaf_alone_says_what_to_do(make):
    module = make()
    with pytest.raises(TypeError, match=f"^{type(module).__name__}: torch.fx must trace a module that has this one in"):
        fx.symbolic_trace(module)


def test_an_operator_in_a_module_of_ones_own_says_what_to_do():
    from crate_kernels import mssa

    with pytest.raises(TypeError, match=r"mssa: w must be a Tensor .*, got a symbol of torch.fx: make the module that"):
        fx.symbolic_trace(lambda w: mssa(w))


# PyTorch's, of its tracer.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("family", [f for f in (*FAMILIES, *CRATES) if f != "crate_mae"])  # takes a None
def test_a_trace_has_the_gradients(family):
    model, images = model_of(family), images_of(family)

    class Logits(nn.Module):  # a trace cannot return the None that stands for no loss
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, *inputs):
            return output(family, self.model(*inputs))

    traced = torch.jit.trace(Logits(), images)
    more = tuple(torch.cat([i, i.flip(-1)]) for i in images)
    parameters = [p for p in model.parameters() if p.requires_grad]
    found, expected = (
        torch.autograd.grad(out.sin().sum(), parameters, allow_unused=True)
        for out in (traced(*more), output(family, model(*more)))
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("family", [*FAMILIES, *CRATES])
def test_quantize_dynamic_takes_every_linear_layer(family):
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("needs a PyTorch with quantised products")
    model, tokens = model_of(family), images_of(family)
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    taken = [name for name, module in quantised.named_modules() if isinstance(module, dynamic.Linear)]
    assert taken == [name for name, module in model.named_modules() if type(module) is nn.Linear]
    assert len(taken) == len(linear_layers(model)) > 0
    with torch.no_grad():
        found, expected = (output(family, each(*tokens)) for each in (quantised, model))
    assert 0 < (found - expected).norm() / expected.norm() < 0.3  # 8 bits in and between a few layers


def macs(model, images):
    """The multiplications of linear layers, by their shapes."""
    count, hooks = [], []
    for layer in linear_layers(model):
        hooks.append(layer.register_forward_hook(lambda m, args, out: count.append(out.numel() * m.in_features)))
    model(*images)
    for hook in hooks:
        hook.remove()
    return sum(count)


@pytest.mark.parametrize("backend", ["composite", "cpp", "reference"])
def test_pytorchs_counter_counts_what_ran(backend):
    """Attention is two products of all pairs; a step two of all tokens, or one and W^T W; published, three."""
    from crate_kernels._core import backends

    if backend == "cpp" and backends.unavailable_reason("mssa", "cpp"):
        pytest.skip("needs the C++ extension: python -m crate_kernels build")
    model, (images,) = build("crate", backend=backend).eval(), inputs("crate")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(images)
    tokens, dim, inner, layers = 2 * 13, 24, 24, 2
    pairs = 2 * 13 * 13 * inner
    product, gram = 2 * tokens * dim * dim, 2 * dim**3
    steps = 3 * product if backend == "reference" else min(2 * product, product + gram)
    expected = 2 * macs(model, (images,)) + layers * (2 * 2 * pairs + steps)
    assert counter.get_total_flops() == expected
