"""Models over meshes of two dimensions have one process's gradients: exactly in float64, within tolerance in bfloat16.

For 4 processes. Each way of cutting is also tested with recomputed activations.
"""

import copy
import functools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from crate_kernels.distributed import sequence_parallel, tensor_parallel
from crate_kernels.testing import tolerance
from tests.distributed.common import same, same_gradients, whole
from tests.distributed.sharded_cases import BLOCKS
from tests.distributed.tensor_cases import HEADS
from tests.models import families

BATCH = 8  # two a process: of one image, PyTorch's batch norm takes a transposed gradient for another on CPUs


@functools.cache  # each has groups, and each group threads that wake a hundred times a second
def mesh(*names, shape=None):
    """Two dimensions of 2, or one of 4."""
    return init_device_mesh("cpu", shape or ((4,) if len(names) == 1 else (2, 2)), mesh_dim_names=names)


def shard(model, family, on, policy):
    for block in (*BLOCKS[family](model), model):
        fully_shard(block, mesh=on, mp_policy=policy)
    return model


# Each returns the model, this process's group among those with other data, and the number of such groups.


def fsdp(model, family, policy):
    data = mesh("data")
    return shard(model, family, data, policy), data.get_rank(), 4


def replicas(model, family, policy):
    both = mesh("replica", "shard")
    return shard(model, family, both, policy), both.get_rank(), 4


def fsdp_tensor(model, family, policy):
    both = mesh("data", "tensor")
    tensor_parallel(model, both["tensor"])
    return shard(model, family, both["data"], policy), both["data"].get_local_rank(), 2


def fsdp_sequence(model, family, policy):
    both = mesh("data", "sequence")
    shard(model, family, mesh("all"), policy)
    return sequence_parallel(model, both["sequence"]), both["data"].get_local_rank(), 2


def replicas_sequence(model, family, policy):
    """Weights are cut within a sequence group, and groups have copies."""
    both = mesh("data", "sequence")
    shard(model, family, both, policy)
    return sequence_parallel(model, both["sequence"]), both["data"].get_local_rank(), 2


def sequence_tensor(model, family, policy):
    both = mesh("sequence", "tensor")
    tensor_parallel(model, both["tensor"])
    shard(model, family, both["sequence"], policy)
    return sequence_parallel(model, both["sequence"]), 0, 1


def sequence_tensor_whole(model, family, policy):
    """Weights that are not cut further."""
    both = mesh("sequence", "tensor")
    tensor_parallel(model, both["tensor"])
    return sequence_parallel(model, both["sequence"]), 0, 1


def ddp(model, family, policy):
    data = mesh("data")
    return DistributedDataParallel(model, process_group=data.get_group()), data.get_rank(), 4


def ddp_sequence(model, family, policy):
    both = mesh("data", "sequence")
    sequence_parallel(model, both["sequence"])
    wrapped = DistributedDataParallel(model, process_group=both["data"].get_group())
    return wrapped, both["data"].get_local_rank(), 2


def ddp_tensor(model, family, policy):
    """DistributedDataParallel takes no DTensors: replicas of one shard do the same."""
    both = mesh("replica", "shard", "tensor", shape=(2, 1, 2))
    tensor_parallel(model, both["tensor"])
    shard(model, family, both["replica", "shard"], policy)
    return model, both["replica"].get_local_rank(), 2


def inputs_of(family, dtype):
    return [None if x is None else x.chunk(BATCH) for x in families.inputs(family, batch=BATCH, dtype=dtype)]


def loss(model, family, parts, group, groups):
    """Of a group's part of the batch."""
    share = BATCH // groups
    own = [None if x is None else torch.cat(x[group * share : (group + 1) * share]) for x in parts]
    if family.endswith(("_lm", "_overcomplete")):
        return model(own[0], own[0].roll(-1, 1))[1]
    return families.output(family, model(*own)).square().mean()


def exact(family, cut, **changes):
    def run(group):
        expected = families.drawn(families.build(family, **HEADS.get(family, {}), **changes).double()).eval()
        parts = inputs_of(family, torch.float64)
        model, index, groups = cut(copy.deepcopy(expected), family, MixedPrecisionPolicy())
        for _ in range(2):  # gradients of two calls are added up
            actual, wanted = loss(model, family, parts, index, groups), loss(expected, family, parts, 0, 1)
            actual.backward()
            wanted.backward()
        mean = actual.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        same(mean, wanted.detach(), "loss")
        same_gradients(getattr(model, "module", model), expected)

    return run


def half(family, cut, **changes):
    """Products in bfloat16, gradients added up in float32."""

    def run(group):
        start = families.drawn(families.build(family, **HEADS.get(family, {}), **changes)).bfloat16().eval()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model, index, groups = cut(copy.deepcopy(start).float(), family, policy)
        exact, eager = copy.deepcopy(start).double(), copy.deepcopy(start)
        parts = inputs_of(family, torch.bfloat16)
        for each, dtype, place in (
            (model, torch.float32, (index, groups)),
            (exact, torch.float64, (0, 1)),
            (eager, torch.bfloat16, (0, 1)),
        ):
            cast = [x if x is None or not x[0].is_floating_point() else [y.to(dtype) for y in x] for x in parts]
            loss(each, family, cast, *place).backward()
        names = [name for name, p in exact.named_parameters() if p.grad is not None]
        grads = [
            {f"d{name}": whole(dict(m.named_parameters())[name].grad) for name in names} for m in (model, eager, exact)
        ]
        wrong = [each for each in tolerance.measure(*grads, torch.bfloat16) if not each.passed]
        assert not wrong, wrong

    return run


LANGUAGE, VISION = ("crate_lm", "crate_lm_overcomplete", "tost_lm"), ("crate", "crate_alpha", "tost")
RECOMPUTED = {"grad_checkpointing": True}
# ToST's embedding has SyncBatchNorm, which DistributedDataParallel takes on GPUs only.
ANY, TEXTS = (fsdp, replicas, fsdp_tensor, ddp, ddp_tensor), (fsdp_sequence, replicas_sequence, ddp_sequence)
BOTH = (sequence_tensor, sequence_tensor_whole)
PAIRS = [
    *((family, cut) for cut in ANY for family in (*LANGUAGE, *VISION) if (family, cut) != ("tost", ddp)),
    *((family, cut) for cut in (*TEXTS, *BOTH) for family in LANGUAGE),
]
HALVES = [("crate_lm", cut) for cut in (fsdp, replicas, fsdp_tensor, fsdp_sequence, replicas_sequence, sequence_tensor)]
HALVES += [(family, cut) for family in ("crate", "tost_lm") for cut in (fsdp, fsdp_tensor)]
CASES = {
    **{f"mesh-{cut.__name__}-{family}": exact(family, cut) for family, cut in PAIRS},
    **{
        f"mesh-recomputed-{cut.__name__}-{family}": exact(family, cut, **RECOMPUTED)
        for family, cut in PAIRS
        if family in ("crate_lm", "tost_lm", "crate")
    },
    **{f"mesh-bfloat16-{cut.__name__}-{family}": half(family, cut) for family, cut in HALVES},
}
