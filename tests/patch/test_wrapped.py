"""``patch`` on a model that something wraps, compiles or records: done, or left with the reason."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from crate_kernels._patch.api import patch, unpatch
from tests.patch.published import Attention, FeedForward, VisionTSSA, assert_close, outcome, system, tokens

BEFORE = "what it records cannot be replaced; patch the model before it is"


class Leaves(fx.Tracer):
    """Records calls of the published modules as they are."""

    def is_leaf_module(self, m, module_qualified_name):
        return isinstance(m, (Attention, FeedForward))


def traced(model, tracer=None):
    tracer = fx.Tracer() if tracer is None else tracer
    return fx.GraphModule(model, tracer.trace(model))


class Plain(Attention):
    """Its forward has no argument on which torch.fx would have to decide."""

    def forward(self, x):
        w = self.qkv(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        weights = self.attend(w @ w.transpose(-1, -2) * self.scale)
        return self.to_out((weights @ w).transpose(1, 2).flatten(2))


def plain():
    torch.manual_seed(0)
    return nn.Sequential(Plain(), FeedForward(), nn.LayerNorm(12)).eval()


def test_a_graph_whose_leaves_are_the_published_modules():
    model = traced(system("crate").eval(), Leaves())
    before = outcome(model, tokens())
    report = patch(model, backend="reference")
    assert set(report.replaced.values()) == {"mssa", "ista"}
    assert report.left == {}
    assert_close(outcome(model, tokens()), before, 64)
    assert unpatch(model) == tuple(report.replaced)
    assert all(torch.equal(a, b) for a, b in zip(outcome(model, tokens()), before, strict=True))


@pytest.mark.parametrize("name", ["", "0", "inner.graph"])
def test_a_graph_of_operators_is_left(name):
    model: Any = traced(plain())
    for part in reversed(name.split(".") if name else []):
        model = nn.ModuleDict({part: model}) if part != "0" else nn.Sequential(model)
    report = patch(model)
    assert report.replaced == {}
    assert report.left == {name: f"a graph of torch.fx or torch.export: {BEFORE}"}


def test_an_exported_model_is_left():
    model = torch.export.export(plain(), (tokens(),)).module()
    assert patch(model).left == {"": f"a graph of torch.fx or torch.export: {BEFORE}"}


def test_a_script_is_left():
    model = torch.jit.trace(plain(), tokens())
    report = patch(nn.Sequential(model, FeedForward()))
    assert report.replaced == {"1": "ista"}
    assert report.left == {"0": f"a script or trace of torch.jit: {BEFORE}"}


def test_a_graph_of_a_patched_model_is_of_its_published_forwards():
    model = plain()
    patch(model)
    graph = traced(model)
    assert "crate_kernels" not in graph.code
    torch.testing.assert_close(graph(2.0 * tokens()), model(2.0 * tokens()))


@pytest.mark.parametrize("part", ["", "0", "0.attn"], ids=["model", "layer", "module"])
def test_a_module_compiled_in_place_sees_the_patch(part):
    model = system("crate").eval()
    model.get_submodule(part).compile(backend="eager")
    calls, x = [], tokens()
    with torch.no_grad():
        before = model(x)
        model[0].attn.attend.register_forward_hook(lambda *_: calls.append(1))
        assert len(patch(model, backend="reference").replaced) == 4
        model[0].attn.attend._forward_hooks.clear()
        model[0].attn.attend.forward = lambda _: pytest.fail("the published forward ran")
        torch.testing.assert_close(model(x), before)
        assert calls == []
        del model[0].attn.attend.forward
        unpatch(model)
        assert torch.equal(model(x), before)


def test_a_model_in_data_parallel():
    model = DataParallel(system("crate").eval())
    before = outcome(model, tokens())
    report = patch(model)
    assert set(report.replaced) == {f"module.{i}.{part}" for i in range(2) for part in ("attn", "code")}
    assert_close(outcome(model, tokens()), before, 64)
    assert unpatch(model) == tuple(report.replaced)


def test_a_model_in_distributed_data_parallel(tmp_path):
    """Patched before or after it is wrapped: every gradient goes through its reducer as before."""

    def trained(model):
        model(tokens()).square().mean().backward()
        return [p.grad.clone() for p in model.parameters()]

    def reduced(count, bucket):
        count.append(len(bucket.gradients()))
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        expected = trained(system("crate"))
        for early in (True, False):
            inner, gradients = system("crate"), []
            if early:
                patch(inner)
            model = DistributedDataParallel(inner)
            model.register_comm_hook(gradients, reduced)
            replaced = set() if early else {f"module.{i}.{part}" for i in range(2) for part in ("attn", "code")}
            assert set(patch(model).replaced) == replaced
            assert_close(trained(model), expected, 64)
            assert sum(gradients) == len(expected)
    finally:
        dist.destroy_process_group()


def test_attention_with_more_than_mssa_beside_it():
    """A model of both: the white-box half is replaced, the ordinary half is left with the reason."""
    model = nn.Sequential(VisionTSSA(), nn.TransformerEncoderLayer(12, 3, batch_first=True))
    report = patch(model)
    assert report.replaced == {"0": "tssa"}
    assert report.left == {
        "1.self_attn": "has projections of its own for query, key and value, where mssa has one: not white-box"
    }
