"""Our models in ONNX Runtime, exported with ``backend="reference"``: equal numbers for any batch and length."""

import pytest
import torch

from tests.models.families import build, drawn, inputs, output

# PyTorch's exporter, of itself.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
IMAGES, TEXTS = ("batch",), ("batch", "seqlen")
SIZES = {
    **dict.fromkeys(("crate", "crate_alpha", "crate_mae_encoder", "tost", "aot_vision"), IMAGES),
    **dict.fromkeys(("crate_lm", "crate_lm_overcomplete", "tost_lm", "aot_lm"), TEXTS),
}
QUICK = ("tost", "crate_lm")  # an export takes seconds; docs/export.md has CRATE


@pytest.mark.parametrize("family", [pytest.param(f, marks=() if f in QUICK else pytest.mark.exhaustive) for f in SIZES])
def test_onnx_runtime_computes_the_same(family, tmp_path):
    pytest.importorskip("onnxscript", reason="needs onnxscript: the extra onnx")
    runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime: the extra onnx")
    model, (example,) = drawn(build(family, backend="reference")).eval(), inputs(family)
    limits = {"seqlen": torch.export.Dim("seqlen", max=getattr(model.config, "block_size", 1))}
    shapes = ({index: limits.get(size, torch.export.Dim.AUTO) for index, size in enumerate(SIZES[family])},)
    program = torch.onnx.export(model, (example,), dynamo=True, dynamic_shapes=shapes, verbose=False)
    program.save(tmp_path / "model.onnx")
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    (slot,) = session.get_inputs()
    others = torch.cat([example, example.flip(-1)])
    for images in (example, others[:, :5] if SIZES[family] == TEXTS else others):
        (found,) = session.run(None, {slot.name: images.numpy()})
        with torch.no_grad():
            expected = output(family, model(images))
        torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-5, atol=1e-5)
