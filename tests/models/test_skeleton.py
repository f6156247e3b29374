"""What is read of a file before a model is built: shapes and dtypes alone, on the meta device, of sizes that can be."""

import json
import struct

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from crate_kernels.models._shared import official, reading, skeleton


def test_a_model_is_built_without_memory_whatever_it_asks_for():
    def make():
        layer = nn.Linear(2**20, 2**20)
        return layer, torch.zeros(3, device="cpu"), torch.arange(4.0)

    layer, zeros, steps = skeleton.build(make, 2)
    assert {t.device.type for t in (layer.weight, layer.bias, zeros, steps)} == {"meta"}
    assert (layer.weight.shape, zeros.shape, steps.shape) == ((2**20, 2**20), (3,), (4,))


@pytest.mark.parametrize("size", [-1, 2**62])
def test_sizes_that_no_tensor_can_have(size):
    with pytest.raises(ValueError, match=r"^no tensor has these sizes: [^\n]+$"):
        skeleton.build(lambda: torch.empty(size, 4), 1)


@pytest.mark.parametrize("tensors", [0, 3])
def test_far_more_tensors_than_a_file_has(tensors):
    def make(count):
        return lambda: [torch.ones(1) for _ in range(count)]

    assert len(skeleton.build(make(4 * tensors + 100), tensors)) == 4 * tensors + 100
    with pytest.raises(ValueError, match=r"^the config has more layers than the weights$"):
        skeleton.build(make(4 * tensors + 101), tensors)


def test_shapes_and_dtypes_of_a_file(tmp_path):
    path = tmp_path / "model.safetensors"
    whole = {str(dtype): torch.zeros(2, 3, dtype=dtype) for dtype in reading._DTYPES.values()}
    save_file(whole, path)
    found = reading.shapes("Owner", path)
    assert {name: (t.dtype, t.shape, t.device.type) for name, t in found.items()} == {
        name: (t.dtype, t.shape, "meta") for name, t in whole.items()
    }


def test_a_dtype_that_no_model_has_is_named(tmp_path):
    path = tmp_path / "model.safetensors"
    header = json.dumps({"odd": {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0\0")
    with pytest.raises(ValueError, match=r"^Owner: .*: odd must be of BOOL, .*F32, .*, got F8_E4M3$"):
        reading.shapes("Owner", path)


def test_entries_of_a_checkpoint_that_are_the_same():
    one, meta = torch.ones(2), torch.ones(2, device="meta")
    assert official.same(one, one.clone())
    assert official.same(one, one.double())
    assert official.same(torch.ones(2, dtype=torch.float8_e5m2), one)
    assert official.same(meta, torch.zeros(2, device="meta"))
    for other in (one + 1, torch.ones(3), meta, 1.0, None):
        assert not official.same(one, other)
    assert not official.same(meta, one)
