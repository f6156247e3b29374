"""``sequence_parallel``: models and modules of which each process has a part of the tokens, against one process."""

import copy
import statistics
from collections import defaultdict

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from crate_kernels import models, patch
from crate_kernels.distributed import sequence_parallel, unshard
from crate_kernels.models import tost
from crate_kernels.nn import MSSA, TSSA, CausalMSSA, CausalTSSA
from crate_kernels.testing import tolerance
from tests.distributed.common import drawn, own, same, same_gradients, whole
from tests.models import families
from tests.patch import published

DIM, HEADS = 12, 6


def text(seqlen, batch=3):
    """Tokens, and the next ones, of which some do not count."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(families.TEXT["vocab_size"], (batch, seqlen + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[0, : seqlen // 2] = -1
    return tokens[:, :-1], targets


def made(family, **changes):
    return families.drawn(families.build(family, **changes).double())


def language(family, seqlen=7, changes=None, **options):
    def run(group):
        expected = made(family, **(changes or {}))
        model = sequence_parallel(copy.deepcopy(expected), group, **options)
        tokens, targets = text(seqlen)
        logits, loss = model(tokens, targets)
        all_logits, all_loss = expected(tokens, targets)
        same(logits, own(all_logits, group, 1, options.get("balanced", False)), "logits")
        same(loss, all_loss, "loss")
        for _ in range(2):  # gradients of two calls are added up
            model(tokens, targets)[1].backward()
            expected(tokens, targets)[1].backward()
        same_gradients(model, expected)

    return run


def two_lengths(family, **options):
    """Two calls wait for one backward pass, which recomputes each with its own lengths."""

    def run(group):
        expected = made(family, grad_checkpointing=True)
        model = sequence_parallel(copy.deepcopy(expected), group, **options)
        for each in (model, expected):
            (each(*text(7))[1] + each(*text(8))[1]).backward()
        same_gradients(model, expected)

    return run


def module(make, **options):
    """A module alone takes and returns this rank's tokens; padding, and lengths that it asks for."""

    def run(group):
        balanced = options.get("balanced", False)
        expected = families.drawn(make().double())
        model = sequence_parallel(copy.deepcopy(expected), group, **options)
        x, mask = drawn(2, 7, DIM), torch.ones(2, 7, dtype=torch.bool)
        mask[1, 4:] = False
        whole, part = x.clone().requires_grad_(), own(x, group, 1, balanced).requires_grad_()
        wanted = expected(whole, key_padding_mask=mask)
        out = model(part, key_padding_mask=own(mask, group, 1, balanced))
        same(out, own(wanted, group, 1, balanced))
        wanted.square().sum().backward()
        out.square().sum().backward()
        same(part.grad, own(whole.grad, group, 1, balanced))
        same_gradients(model, expected)

    return run


def blocks(model):
    return [*model.transformer["h"], model]


def sharded_gradients(expected, dtype, group, data):
    """Return gradients of a model sharded over all ranks, of ``data`` groups with other texts; and one process's.

    Those come from the same dtype with reference operators, and from ``expected``, which is float64.
    """
    size = dist.get_world_size(group)
    groups = size if data else 1
    mesh = init_device_mesh("cpu", (groups, size // groups), mesh_dim_names=("data", "sequence"))
    model, eager = (copy.deepcopy(expected).to(dtype) for _ in range(2))
    for part in blocks(model):
        fully_shard(part, mesh=init_device_mesh("cpu", (size,)))
    sequence_parallel(model, mesh["sequence"])
    tokens, targets = text(7)
    index = mesh["data"].get_local_rank()
    model(tokens.roll(index, 0)[:2], targets.roll(index, 0)[:2])[1].backward()
    for module in eager.modules():
        if hasattr(module, "backend"):
            module.backend = "reference"
    for one in (eager, expected):
        for other in range(groups):
            (one(tokens.roll(other, 0)[:2], targets.roll(other, 0)[:2])[1] / groups).backward()
    return [{f"d{name}": whole(p.grad) for name, p in m.named_parameters()} for m in (model, eager, expected)]


def sharded(data):
    """fully_shard: exact in float64, and as near as one process in float32, which is divided in other places."""

    def run(group):
        actual, _, expected = sharded_gradients(made("crate_lm"), torch.float64, group, data)
        for name, wanted in expected.items():
            same(actual[name], wanted, name)

    return run


def sharded_single(data):
    """A float32 gradient through all layers errs by luck: the error of each parameter is the median of 9 models."""

    def run(group):
        ratios = defaultdict(list)
        for seed in range(9):
            model = families.drawn(families.build("crate_lm").double(), seed)
            for each in tolerance.measure(*sharded_gradients(model, torch.float32, group, data), torch.float32):
                assert each.finite, each
                ratios[each.output].append(each.share)
        wrong = {name: drawn for name, drawn in ratios.items() if statistics.median(drawn) > 1}
        assert not wrong, wrong

    return run


def data_parallel(group):
    """DDP around it, over ranks of other data: here one per group, and all of them."""
    size = dist.get_world_size(group)
    for shape in ((1, size), (size, 1)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "sequence"))
        expected = made("tost_lm")
        model = sequence_parallel(copy.deepcopy(expected), mesh["sequence"])
        wrapped = DistributedDataParallel(model, process_group=mesh["data"].get_group())
        tokens, targets = text(6)
        index = mesh["data"].get_local_rank()
        wrapped(tokens.roll(index, 0)[:2], targets.roll(index, 0)[:2])[1].backward()
        for other in range(shape[0]):
            (expected(tokens.roll(other, 0)[:2], targets.roll(other, 0)[:2])[1] / shape[0]).backward()
        same_gradients(model, expected)


def saved_as_before(group):
    """Parameters keep their names, and the config its class; all logits can be put together."""
    expected = made("crate_lm")
    model = sequence_parallel(copy.deepcopy(expected), group)
    assert model.state_dict().keys() == expected.state_dict().keys()
    assert model._name == "CRATELM"
    assert isinstance(model, models.CRATELM)
    tokens, _ = text(5)
    same(unshard(model(tokens)[0], group, 1), expected(tokens)[0])
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[0, 3:] = False
    hidden = expected.hidden(tokens, key_padding_mask=mask)
    same(model.hidden(tokens, key_padding_mask=mask), own(hidden, group, 1))


class PreTrainedModel(nn.Module):
    """Stands for the class of this name in transformers."""

    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)


class Mixed(PreTrainedModel):
    """A model of transformers."""


def patched():
    model = nn.Sequential(nn.Identity(), published.Attention())
    assert patch(model).replaced
    return model


MIXING = {
    "image-model": (lambda: families.build("crate"), "got CRATE: cut its blocks alone"),
    "image-model-inside": (
        lambda: nn.Sequential(nn.Identity(), families.build("crate")),
        "got Sequential with CRATE 1: cut its blocks alone",
    ),
    "other-attention": (
        lambda: families.build("aot_mhsa_lm"),
        r"got AoTLM with MHSA transformer\.h\.0\.attn: it would attend to this rank's tokens alone",
    ),
    "torch": (
        lambda: nn.TransformerEncoderLayer(DIM, HEADS),
        "got TransformerEncoderLayer with MultiheadAttention self_attn: it would attend to this rank's tokens alone",
    ),
    "patched": (patched, "got Sequential with FusedAttention 1: it is patched"),
    "transformers": (
        lambda: Mixed(nn.Embedding(9, DIM), CausalTSSA(DIM, HEADS, 9)),
        "got Mixed: it places this rank's tokens as if they were all",
    ),
    "transformers-inside": (
        lambda: nn.Sequential(Mixed(CausalMSSA(DIM, HEADS))),
        "got Sequential with Mixed 0: it places this rank's tokens as if they were all",
    ),
}


def mixing(make, message):
    """A model that would run without an error, on this rank's tokens alone."""

    def run(group):
        model = make()
        kinds = [type(each) for each in model.modules()]
        with pytest.raises(
            NotImplementedError, match=f"sequence_parallel: model must be a language model .*, {message}"
        ):
            sequence_parallel(model, group)
        assert [type(each) for each in model.modules()] == kinds

    return run


DROPPING = {
    "path": lambda: tost.DropPath(0.5),
    "tokens": lambda: nn.Dropout(0.5),
    "channels": lambda: nn.Dropout1d(0.5),
    "alpha": lambda: nn.AlphaDropout(0.5),
}


def dropping(make):
    """Dropout outside of an attention is refused in training, and nothing in evaluation."""

    def run(group):
        model = sequence_parallel(nn.Sequential(MSSA(DIM, HEADS, 2), make()), group)
        part = drawn(2, 3, DIM, dtype=torch.float32)
        with pytest.raises(NotImplementedError, match=r"dropout of tokens must be 0 in training, got 0\.5"):
            model(part)
        assert model.eval()(part).shape == part.shape

    return run


def refused(group):
    size = dist.get_world_size(group)
    model = sequence_parallel(made("crate_lm", dropout=0.5), group)
    tokens, targets = text(7)
    module = sequence_parallel(MSSA(DIM, HEADS, 2, causal=True), group)
    part = torch.zeros(1, 2, DIM)
    caches = "sequence_parallel: caches must be None"
    for error, message, call in (
        (NotImplementedError, caches, lambda: model.generate(tokens, 2)),
        (NotImplementedError, caches, lambda: model.new_caches(1, 2)),
        (NotImplementedError, caches, lambda: model.hidden(tokens, caches=[])),
        (NotImplementedError, caches, lambda: module.new_cache(1, 2)),
        (NotImplementedError, caches, lambda: module(part, cache=MSSA(DIM, HEADS, 2).new_cache(1, 2))),
        (NotImplementedError, "return_attention must be False", lambda: module(part, return_attention=True)),
        (NotImplementedError, "dropout of tokens must be 0 in training, got 0.5", lambda: model.train()(tokens)),
        (ValueError, "CRATELM: tokens must be at most block_size = 9 long, got 10", lambda: model(*text(10))),
        (ValueError, "CRATELM: targets must be tokens' shape", lambda: model.eval()(tokens, targets[:, 1:])),
        (ValueError, "CRATELM: tokens must be int64 or int32", lambda: model(tokens[0])),
        (ValueError, "model must not be parallel already", lambda: sequence_parallel(model, group)),
        (TypeError, "model must be a Module, got NoneType", lambda: sequence_parallel(None, group)),
        (ValueError, "form must be None or one of heads", lambda: sequence_parallel(module, group, form="no")),
        (
            ValueError,
            "balanced must be False for token statistics",
            lambda: sequence_parallel(TSSA(DIM, 3), group, balanced=True),
        ),
    ):
        with pytest.raises(error, match=message):
            call()
    late = sequence_parallel(made("crate_lm"), group)
    fully_shard(late, mesh=init_device_mesh("cpu", (size,)))
    with pytest.raises(RuntimeError, match=r"sequence_parallel: call fully_shard before sequence_parallel"):
        late(tokens)
    alone = fully_shard(made("crate_lm"), mesh=init_device_mesh("cpu", (size, 1), mesh_dim_names=("a", "b"))["b"])
    with pytest.raises(ValueError, match=r"sequence_parallel: fully_shard's mesh must include group, whose ranks are"):
        sequence_parallel(alone, group)
    mixed = made("crate_lm")
    fully_shard(mixed.transformer["h"][0], mesh=init_device_mesh("cpu", (size,)))
    fully_shard(mixed, mesh=init_device_mesh("cpu", (1, size), mesh_dim_names=("a", "b"))["a"])
    with pytest.raises(
        ValueError,
        match=r"sequence_parallel: fully_shard's mesh must be the same for all parameters, got \[1, \d\] ranks",
    ):
        sequence_parallel(mixed, dist.new_group([dist.get_rank()], use_local_synchronization=True))


CASES = {
    **{f"language-{family}": language(family) for family in ("crate_lm", "crate_lm_overcomplete", "tost_lm", "aot_lm")},
    **{f"language-one-token-{family}": language(family, 1) for family in ("crate_lm", "tost_lm")},
    "language-heads": language("crate_lm", changes={"n_head": 6}, form="heads"),
    "language-balanced": language("crate_lm", form="ring", balanced=True),
    "language-recomputed": language("crate_lm", changes={"grad_checkpointing": True}, form="gather"),
    "language-recomputed-lengths": two_lengths("crate_lm", form="gather"),
    "language-recomputed-lengths-balanced": two_lengths("crate_lm", form="ring", balanced=True),
    "language-recomputed-lengths-tost": two_lengths("tost_lm"),
    "module-mssa": module(lambda: MSSA(DIM, HEADS, 2)),
    "module-mssa-tied": module(lambda: MSSA(DIM, HEADS, 2, tied=True), form="ring"),
    "module-causal-mssa": module(lambda: CausalMSSA(DIM, HEADS), form="gather", balanced=True),
    "module-tssa": module(lambda: TSSA(DIM, HEADS)),
    "module-causal-tssa": module(lambda: CausalTSSA(DIM, HEADS, 9)),
    "sequence-fsdp": sharded(data=False),
    "sequence-fsdp-data": sharded(data=True),
    "sequence-fsdp-float32": sharded_single(data=False),
    "sequence-fsdp-data-float32": sharded_single(data=True),
    "sequence-ddp": data_parallel,
    "sequence-saved": saved_as_before,
    "sequence-refused": refused,
    **{f"sequence-mixing-{name}": mixing(*case) for name, case in MIXING.items()},
    **{f"sequence-dropping-{name}": dropping(make) for name, make in DROPPING.items()},
}
