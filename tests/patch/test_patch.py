"""``patch`` and ``unpatch`` on the published modules: same numbers, and everything else as it was."""

# pyright: reportAttributeAccessIssue=false

import copy
import inspect
import io
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from crate_kernels._core import backends
from crate_kernels._patch.api import patch, unpatch
from tests.patch.published import (
    DIM,
    SYSTEMS,
    Attention,
    Block,
    CausalAttention,
    CausalTSSA,
    DecoderFeedForward,
    FeedForward,
    Overcomplete,
    TiedOvercomplete,
    VisionTSSA,
    assert_close,
    outcome,
    system,
    tokens,
)


def available(*ops):
    def runs(name):
        try:
            return all(backends.resolve(op, name, torch.device("cpu"), torch.float32) == name for op in ops)
        except RuntimeError:
            return False

    return [None, *filter(runs, backends.names())]


@pytest.mark.parametrize("backend", available(*backends.OPS))
@pytest.mark.parametrize("name", SYSTEMS)
def test_same_numbers_and_report(name, backend, capsys):
    if "identity" in name and backend not in (None, "composite", "reference"):
        pytest.skip("needs kernels with phi='identity': composite and reference alone have it, and run this case")
    model = system(name).eval()
    parameters = dict(model.named_parameters())
    keys, types = list(model.state_dict()), [type(m) for m in model.modules()]
    before = outcome(model, tokens())
    capsys.readouterr()

    report = patch(model, backend=backend)
    wanted = SYSTEMS[name][1]
    assert report.replaced == {f"{i}.{part}": op for i in range(2) for part, op in wanted.items()}
    assert list(report.left) == (["0.code", "1.code"] if name.startswith("mae-decoder") else [])
    assert all("computes something else" in reason for reason in report.left.values())
    # Float32 sums of a dozen terms in another order, through two layers.
    assert_close(outcome(model, tokens()), before, 64)
    assert all(p is parameters[n] for n, p in model.named_parameters())
    assert list(model.state_dict()) == keys
    assert capsys.readouterr() == ("", "")  # prints of a published forward are hidden too

    assert unpatch(model) == tuple(report.replaced)
    assert [type(m) for m in model.modules()] == types
    assert all(torch.equal(a, b) for a, b in zip(outcome(model, tokens()), before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("moved", ["before", "after"])
@pytest.mark.parametrize("name", ["crate", "alpha", "lm", "lm-overcomplete", "tost", "tost-causal"])
def test_dtypes(name, moved, dtype):
    model = system(name).eval()
    expected = copy.deepcopy(model).to(dtype)(tokens(dtype))
    model = model.to(dtype) if moved == "before" else model
    assert len(patch(model).replaced) == 2 * len(SYSTEMS[name][1])
    assert_close([model.to(dtype)(tokens(dtype))], [expected], 64 if dtype == torch.float64 else 16)


def test_meta_device():
    with torch.device("meta"):
        model = nn.Sequential(Attention(), FeedForward(), DecoderFeedForward())
    assert patch(model).replaced == {"0": "mssa", "1": "ista"}
    model.to_empty(device="cpu")
    assert model(tokens()).shape == (2, 5, DIM)


def test_root_and_shared_modules():
    attention = Attention()
    assert patch(attention).replaced == {"": "mssa"}
    unpatch(attention)
    model = nn.ModuleDict({"a": attention, "b": nn.Sequential(attention)})
    assert patch(model).replaced == {"a": "mssa", "b.0": "mssa"}
    assert unpatch(model) == ("a",)
    assert type(attention) is Attention


def test_twice_is_once_and_unpatch_without_patch_is_nothing():
    model = system("crate")
    assert unpatch(model) == ()
    patch(model, backend="reference")
    types = [type(m) for m in model.modules()]
    report = patch(model, backend="composite")
    assert report.replaced == {}
    assert set(report.left.values()) == {"already patched; unpatch first to change the backend"}
    assert [type(m) for m in model.modules()] == types


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "save"])
def test_copies_are_patched_and_independent(way):
    model = Block(Attention(), FeedForward()).eval()
    patch(model, backend="reference")
    if way == "deepcopy":
        other = copy.deepcopy(model)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    assert torch.equal(other(tokens()), model(tokens()))
    assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]
    with torch.no_grad():
        other.attn.qkv.weight.zero_()
    assert not torch.equal(other(tokens()), model(tokens()))
    assert unpatch(other) == ("attn", "code")
    assert type(other.attn) is Attention
    assert type(model.attn) is not Attention


def test_a_module_that_pickles_itself_is_refused():
    class Own(FeedForward):
        def __reduce__(self):
            return FeedForward, ()

    model = Own()
    assert patch(model).replaced == {"": "ista"}
    with pytest.raises(pickle.PicklingError, match="call unpatch first"):
        copy.deepcopy(model)


def test_replicas_use_their_own_parameters():
    model = FeedForward()
    patch(model)
    replica = model._replicate_for_data_parallel()
    replica.weight = torch.zeros(DIM, DIM)
    assert torch.allclose(replica(tokens()), F.relu(tokens() - model.step_size * model.lambd))


def test_a_class_derived_after_patch_is_refused():
    model = nn.Sequential(FeedForward(), FeedForward())
    patch(model)
    nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Identity())
    with pytest.raises(RuntimeError, match="unpatch: 0 must have the class patch gave it"):
        unpatch(model)
    assert type(model[1]) is not FeedForward
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    assert unpatch(model) == ("0", "1")


def test_compiles_in_one_graph():
    torch.manual_seed(0)
    crate = Attention(), FeedForward(), Overcomplete(), CausalAttention(), TiedOvercomplete()
    model = nn.Sequential(*crate, VisionTSSA(), CausalTSSA())
    assert len(patch(model).replaced) == 7
    # Not compared with the published modules here: in a chain of seven, roundings grow a thousandfold.
    expected = outcome(model, tokens())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(outcome(compiled, tokens()), expected, 64)


def test_a_compiled_model_sees_the_patch():
    model = system("crate").eval()
    compiled: Any = torch.compile(model, backend="eager")
    calls, x = [], tokens()
    with torch.no_grad():
        before = compiled(x)
        patch(compiled)
        model[0].attn.attend.register_forward_hook(lambda *_: calls.append(1))
        assert torch.allclose(compiled(x), before, atol=1e-5)
        assert calls == [1]
        unpatch(compiled)
        assert torch.equal(compiled(x), before)


def test_the_signature_is_the_published_one():
    model = Attention()
    patch(model)
    assert inspect.signature(model.forward) == inspect.signature(Attention().forward)
    assert isinstance(model, Attention)
    assert "FusedAttention" in repr(model)


def test_training_continues_with_the_same_optimizer():
    def train(model, steps):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(steps):
            if step == 1:
                patch(model) if patched else None
            optimizer.zero_grad()
            loss = model(tokens()).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    patched = False
    plain = train(system("crate"), 4)
    patched = True
    assert train(system("crate"), 4) == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize("name", ["crate", "lm-overcomplete", "tost"])
def test_a_trace_is_the_published_forwards(name):
    model = system(name).eval()
    patch(model)
    traced = torch.jit.trace(model, tokens())
    assert "crate_kernels" not in str(traced.inlined_graph)
    torch.testing.assert_close(traced(2.0 * tokens()), model(2.0 * tokens()))


def test_script_is_refused_with_advice():
    model = nn.Sequential(Attention(), nn.GELU())
    patch(model)
    with pytest.raises(RuntimeError, match=r"torch\.jit\.script does not take a patched Attention; call unpatch"):
        torch.jit.script(model)
    assert unpatch(model) == ("0",)


@pytest.mark.parametrize(
    ("model", "backend", "error", "message"),
    [
        ("crate", None, TypeError, "model must be a Module, got str"),
        (Attention(), "fused", ValueError, "backend must be None or one of .*, got 'fused'"),
        (Attention(), 3, ValueError, "got 3"),
    ],
    ids=["model", "name", "number"],
)
def test_bad_arguments(model, backend, error, message):
    with pytest.raises(error, match=message):
        patch(model, backend=backend)


def test_only_a_module_is_unpatched():
    with pytest.raises(TypeError, match="unpatch: model must be a Module, got NoneType"):
        unpatch(None)


def test_an_unavailable_backend_changes_nothing():
    backends.register(backends.Backend("absent", "crate_kernels.ops.{op}.reference", missing="it is not there"))
    try:
        model = system("crate")
        with pytest.raises(RuntimeError, match="backend='absent' is unavailable: it is not there"):
            patch(model, backend="absent")
        assert unpatch(model) == ()
    finally:
        backends.unregister("absent")
