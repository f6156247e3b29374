"""Modules and models cut over two processes by PyTorch: all is float64, and each process has the whole one too."""

import copy
import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from crate_kernels import models, patch, unpatch
from crate_kernels.distributed import tensor_parallel
from crate_kernels.models.aot import MHSA
from crate_kernels.models.crate import RateGradientStep
from crate_kernels.models.tost import ClassAttention, ToSTConfig
from crate_kernels.nn import MSSA, TSSA, CausalMSSA, CausalTSSA
from tests.distributed import common
from tests.models.families import FAMILIES, build, drawn, inputs, output
from tests.nn.adapters import LowRank
from tests.patch import published

DIM, HEADS, HEAD_DIM = 16, 4, 3
QKV = {"qkv": ColwiseParallel(), "to_out.0": RowwiseParallel()}
CAUSAL = {"c_attn": ColwiseParallel(), "c_proj": RowwiseParallel()}


def made(make):
    """A module with every parameter drawn, the same in each process."""
    generator = torch.Generator().manual_seed(0)
    module = make().double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4, generator=generator)
    return module


def tokens(batch=2):
    return torch.randn(batch, 5, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


same_gradients = functools.partial(common.same_gradients, rtol=1e-11, atol=1e-13)


ATTENTION = {
    "mssa": (lambda **k: MSSA(DIM, HEADS, HEAD_DIM, **k), QKV),
    "mssa-causal": (lambda **k: MSSA(DIM, HEADS, HEAD_DIM, causal=True, **k), QKV),
    "mssa-reference": (lambda **k: MSSA(DIM, HEADS, HEAD_DIM, backend="reference", **k), QKV),
    "mssa-tied": (lambda **k: MSSA(DIM, HEADS, HEAD_DIM, tied=True, gamma=0.7, **k), {"qkv": ColwiseParallel()}),
    "causal-mssa": (lambda **k: CausalMSSA(DIM, HEADS, **k), CAUSAL),
    "gradient": (lambda: RateGradientStep(DIM, HEADS, HEAD_DIM, gamma=0.4), {"qkv": ColwiseParallel()}),
}


def heads_apart(make, plan):
    """Output and all gradients, of a module whose heads are on two processes."""

    def run(mesh):
        expected, x = made(make), tokens()
        module = parallelize_module(copy.deepcopy(expected), mesh, plan)
        results = []
        for each in (module, expected):
            tokens_in = x.clone().requires_grad_()
            out = each(tokens_in)
            out.square().sum().backward()
            results.append((out, tokens_in.grad))
        for actual, wanted in zip(*results, strict=True):
            assert_close(actual, wanted, rtol=1e-12, atol=1e-13)
        same_gradients(module, expected)

    return run


def patched(make):
    """A published module with the operator in it."""

    def build():
        module = make()
        assert patch(module).replaced
        return module

    return build


def patched_dropout_is_refused(mesh):
    module = parallelize_module(made(patched(lambda: published.Attention(DIM, HEADS, HEAD_DIM, 0.5))), mesh, QKV)
    with pytest.raises(
        NotImplementedError, match=r"patch: dropout must be 0 where heads are sharded \(2 of 4 are here"
    ):
        module(tokens())


def patched_when_sharded(mesh):
    expected = made(lambda: published.Attention(DIM, HEADS, HEAD_DIM))
    module = parallelize_module(copy.deepcopy(expected), mesh, QKV)
    assert patch(module).replaced == {"": "mssa"}
    assert_close(module(tokens()), expected(tokens()))


def in_distributed_data_parallel(mesh):
    """A wrapped model is patched where it is, and unpatched: gradients of all processes, as without the wrapper."""
    expected = made(lambda: nn.Sequential(published.Attention(DIM, HEADS, HEAD_DIM), published.FeedForward(DIM)))
    model = DistributedDataParallel(copy.deepcopy(expected))
    report = patch(model)
    assert report.replaced == {"module.0": "mssa", "module.1": "ista"}
    x = tokens(batch=4)
    for undo in (False, True):
        assert not undo or unpatch(model) == tuple(report.replaced)
        for each, tokens_in in ((expected, x), (model, x.chunk(2)[mesh.get_rank()])):
            each.zero_grad()
            each(tokens_in).square().mean().backward()
        same_gradients(model, expected)


def refused(make, plan, error, message):
    """A module that cannot do with its part of the heads says so."""

    def run(mesh):
        module, x = parallelize_module(made(make), mesh, plan), tokens()
        with pytest.raises(error, match=message):
            module(x)

    return run


def dropout_is_refused_in_training(mesh):
    for name in ("mssa", "mssa-tied", "causal-mssa"):
        make, plan = ATTENTION[name]
        expected = made(lambda make=make: make(dropout=0.5)).eval()
        module = parallelize_module(copy.deepcopy(expected), mesh, plan)
        assert_close(module(tokens()), expected(tokens()))
        with pytest.raises(NotImplementedError, match=r"MSSA: dropout must be 0 where heads are sharded \(2 of 4 are"):
            module.train()(tokens())


def a_cache_of_the_heads_that_are_here(mesh):
    for name, head_dim in (("mssa-causal", HEAD_DIM), ("causal-mssa", DIM // HEADS)):
        make, plan = ATTENTION[name]
        expected = made(make).eval()
        module = parallelize_module(copy.deepcopy(expected), mesh, plan)
        cache = module.new_cache(2, 5)
        assert cache.data.shape == (2, HEADS // 2, 5, head_dim)
        with torch.no_grad():
            steps = [module(part, cache=cache) for part in tokens().split([3, 1, 1], dim=1)]
            assert_close(torch.cat(steps, dim=1), expected(tokens()))


def generating(family, **changes):
    """Caches have the heads that are here; under fully_shard, which gathers the weight for a call, all of them."""

    def run(mesh):
        expected = drawn(build(family, **changes).double())
        model = tensor_parallel(copy.deepcopy(expected), mesh)
        prompts = inputs(family)[0][:, :3]
        for tokens_in in (prompts, [prompts[0], prompts[1, :1]]):
            options = {"max_new_tokens": 4, "temperature": 0}
            assert_close(model.generate(tokens_in, **options), expected.generate(tokens_in, **options), rtol=0, atol=0)
        whole_heads = sharded(copy.deepcopy(expected), family, mesh).new_caches(2, 5)
        assert [c.data.shape for c in whole_heads] == [c.data.shape for c in expected.new_caches(2, 5)]

    return run


def patched_in_fully_sharded_blocks(mesh):
    """What this process has of the blocks is patched, and unpatched; sharding changes the class of a block too."""
    torch.manual_seed(0)
    crate = published.Block(published.Attention(), published.FeedForward())
    causal = published.Block(published.CausalAttention(), published.Overcomplete())
    model = nn.Sequential(crate, causal, published.Block(published.VisionTSSA(), nn.GELU()))
    expected, _, *expected_grads = published.outcome(model, published.tokens())
    for part in (crate.code, *model, model):
        fully_shard(part, mesh=mesh)
    report = patch(model)
    kinds = {"0.attn": "mssa", "0.code": "ista", "1.attn": "causal mssa", "1.code": "ista_overcomplete"}
    assert report.replaced == {**kinds, "2.attn": "tssa"}, report
    out = model(published.tokens())
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)))
    grads: list[Any] = [p.grad for p in model.parameters()]
    whole = [out.detach(), *(grad.full_tensor() for grad in grads)]
    published.assert_close(whole, [expected, *expected_grads], 64)
    assert len(unpatch(model)) == 5
    published.assert_close([model(published.tokens()).detach()], [expected], 64)


def three_heads_on_two_processes(mesh):
    module = parallelize_module(made(lambda: MSSA(DIM, 3, 4)), mesh, QKV)
    with pytest.raises(
        ValueError, match=r"MSSA: the projection must give whole heads of 4, got a width of 6; shard it"
    ):
        module(tokens())


BLOCKS: dict[str, Any] = {
    "crate": lambda m: m.transformer.layers,
    "crate_alpha": lambda m: m.transformer.layers,
    "crate_mae": lambda m: [*m.blocks, *m.decoder_blocks],
    "crate_mae_encoder": lambda m: m.blocks,
    "tost": lambda m: [*m.blocks, *m.cls_attn_blocks],
    "crate_lm": lambda m: m.transformer["h"],
    "crate_lm_overcomplete": lambda m: m.transformer["h"],
    "tost_lm": lambda m: m.transformer["h"],
    "aot_vision": lambda m: m.layers,
    "aot_lm": lambda m: m.transformer["h"],
    "aot_regression": lambda m: m.layers,
}


def sharded(model, family, mesh):
    for block in BLOCKS[family](model):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def a_model_by_blocks(family, **changes):
    """Each process has half of the batch; the gradients of a mean are those of the whole."""

    def run(mesh):
        expected = drawn(build(family, **changes).double()).eval()
        model = sharded(copy.deepcopy(expected), family, mesh)
        tensors = inputs(family, batch=4, dtype=torch.float64)
        half = [t if t is None else t.chunk(2)[mesh.get_rank()] for t in tensors]
        out, wanted = output(family, model(*half)), output(family, expected(*tensors))
        assert_close(out, wanted.chunk(2)[mesh.get_rank()], rtol=1e-12, atol=1e-13)
        out.square().mean().backward()
        wanted.square().mean().backward()
        same_gradients(model, expected)

    return run


def a_projection_sharded_apart(name, adapt=None):
    """A tied projection that ``fully_shard`` gathers for each of its calls, and an adapter around one."""

    def run(mesh):
        expected = made(ATTENTION[name][0])
        if adapt is not None:
            expected.qkv = adapt(expected.qkv)
        model = copy.deepcopy(expected)
        fully_shard(model.qkv, mesh=mesh)
        fully_shard(model, mesh=mesh)
        x = tokens(batch=4)
        out, wanted = model(x.chunk(2)[mesh.get_rank()]), expected(x)
        assert_close(out, wanted.chunk(2)[mesh.get_rank()], rtol=1e-11, atol=1e-13)
        out.square().mean().backward()
        wanted.square().mean().backward()
        same_gradients(model, expected)

    return run


def data_parallel(family):
    """DistributedDataParallel, whose second step fails where a parameter that requires a gradient got none.

    ToST's SyncBatchNorm needs GPUs there.
    """

    def run(mesh):
        expected = drawn(build(family).double()).eval()
        model = DistributedDataParallel(copy.deepcopy(expected))
        tensors = inputs(family, batch=4, dtype=torch.float64)
        half = [t if t is None else t.chunk(2)[mesh.get_rank()] for t in tensors]
        for _ in range(2):
            for each, batch in ((expected, tensors), (model, half)):
                each.zero_grad()
                output(family, each(*batch)).square().mean().backward()
            same_gradients(model, expected)

    return run


def a_sharded_layer_shows_its_attention(mesh):
    expected: Any = drawn(build("crate").double()).eval()
    model: Any = sharded(copy.deepcopy(expected), "crate", mesh)
    register_fsdp_forward_method(model, "get_last_selfattention")
    register_fsdp_forward_method(model, "get_last_key")
    (img,) = inputs("crate", dtype=torch.float64)
    assert_close(model.get_last_selfattention(img, 1), expected.get_last_selfattention(img, 1))
    assert_close(model.get_last_key(img, 0), expected.get_last_key(img, 0))


def saving(family):
    def run(mesh):
        expected = drawn(build(family))
        model = sharded(copy.deepcopy(expected), family, mesh)
        with tempfile.TemporaryDirectory() as folder:
            for options in ({}, {"state_dict": model.state_dict()}):
                with pytest.raises(
                    ValueError, match=r"save_pretrained: weights must be whole, .*get_model_state_dict\("
                ):
                    model.save_pretrained(folder, **options)
            assert not list(Path(folder).iterdir())
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            state = get_model_state_dict(model, options=options)
            if mesh.get_rank() == 0:
                model.save_pretrained(folder, state_dict=state)
                again = models.from_pretrained(folder).state_dict()
                assert again.keys() == expected.state_dict().keys()
                assert all(torch.equal(again[name], t) for name, t in expected.state_dict().items())

    return run


@functools.cache  # its group has threads that wake all the time
def mesh_of_two():
    return init_device_mesh("cpu", (2,))


ON_MESH = {
    **{f"heads-apart-{name}": heads_apart(*case) for name, case in ATTENTION.items()},
    "heads-apart-patched": heads_apart(patched(lambda: published.Attention(DIM, HEADS, HEAD_DIM)), QKV),
    "heads-apart-patched-causal": heads_apart(patched(lambda: published.CausalAttention(DIM, HEADS)), CAUSAL),
    "heads-apart-then-patched": patched_when_sharded,
    "heads-patched-dropout": patched_dropout_is_refused,
    "heads-patched-tssa": refused(
        patched(lambda: published.VisionTSSA(DIM, HEADS)),
        QKV,
        NotImplementedError,
        r"patch: the projection must be whole, 16 wide, got 8: the softmax is over the heads",
    ),
    "patched-data-parallel": in_distributed_data_parallel,
    "patched-fully-sharded": patched_in_fully_sharded_blocks,
    "heads-odd": three_heads_on_two_processes,
    "heads-tssa": refused(
        lambda: TSSA(DIM, HEADS),
        QKV,
        NotImplementedError,
        r"TSSA: the projection must be whole, 16 wide, got 8: the softmax is over the heads",
    ),
    "heads-causal-tssa": refused(
        lambda: CausalTSSA(DIM, HEADS, 9), CAUSAL, NotImplementedError, r"CausalTSSA: the projection must be whole"
    ),
    "heads-class-attention": refused(
        lambda: ClassAttention(ToSTConfig(DIM, 1, HEADS)),
        {"qkv": ColwiseParallel()},
        NotImplementedError,
        r"ToST: the projection must be whole, 48 wide, got 24: queries, keys and values follow each other",
    ),
    "heads-mhsa": refused(
        lambda: MHSA(DIM, HEADS), QKV, NotImplementedError, r"MHSA: the projection must be whole, 48 wide, got 24"
    ),
    "heads-dropout": dropout_is_refused_in_training,
    "heads-cache": a_cache_of_the_heads_that_are_here,
    "heads-generate": generating("crate_lm", n_head=6),
    "heads-generate-aot": generating("aot_lm", n_head=6, mlp=True),
    **{f"blocks-{family}": a_model_by_blocks(family) for family in BLOCKS},
    **{f"data-parallel-{family}": data_parallel(family) for family in BLOCKS if family != "tost"},
    "blocks-tost-headless": a_model_by_blocks("tost", num_classes=0),
    "blocks-crate-headless": a_model_by_blocks("crate", num_classes=0),
    "blocks-alpha-unpooled": a_model_by_blocks("crate_alpha", num_classes=0, pool="none"),
    "blocks-crate-variants": a_model_by_blocks("crate", attention="tied", kappa=0.5, grad_checkpointing=True),
    "blocks-crate-gradient": a_model_by_blocks("crate", attention="gradient"),
    **{f"apart-{name}": a_projection_sharded_apart(name) for name in ("mssa-tied", "gradient")},
    **{f"apart-{name}-adapted": a_projection_sharded_apart(name, LowRank) for name in ("mssa-tied", "gradient")},
    "blocks-attention": a_sharded_layer_shows_its_attention,
    "save-crate": saving("crate"),
    "save-tied-head": saving("crate_lm"),
}
assert BLOCKS.keys() == FAMILIES.keys()
# These take the mesh of both processes in the place of their group.
CASES = {name: lambda group, case=case: case(mesh_of_two()) for name, case in ON_MESH.items()}
