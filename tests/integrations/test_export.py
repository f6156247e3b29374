"""torch.export and ONNX of every model for transformers: which backend can be exported, and what says so otherwise."""

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: the extra hf")
from transformers import AutoModelForCausalLM, AutoModelForImageClassification

from crate_kernels import models, nn
from crate_kernels._core import backends
from tests.integrations import images, language
from tests.models import families

QUICK = ("crate",)  # an export takes seconds
FAMILIES = [
    pytest.param(family, marks=[] if family in QUICK else pytest.mark.exhaustive)
    for family in (*language.CONFIGS, *images.CONFIGS)
]


def reloaded(family, folder, backend):
    """Return a model of a saved folder that keeps no cache, the name of its input, and two examples of other sizes."""
    if family in language.CONFIGS:
        language.pair(family)[1].save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, backend=backend, use_cache=False)
        return model, "input_ids", (language.prompts(2, 5), language.prompts(3, 9)), {0: "batch", 1: "seqlen"}
    module = images.wrapped(images.pair(family)[0], family)
    module.save_pretrained(folder)
    model = AutoModelForImageClassification.from_pretrained(folder, backend=backend)
    pictures = images.images(family)
    return model, "pixel_values", (pictures, pictures[[1, 0, 1]].flip(2)), {0: "batch"}


@pytest.mark.exhaustive  # docs/export.md has ONNX Runtime on a CRATE
# PyTorch's exporter, of itself.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("family", [*language.CONFIGS, *images.CONFIGS])
def test_onnx_runtime_computes_the_same(family, tmp_path):
    pytest.importorskip("onnxscript", reason="needs onnxscript: the extra onnx")
    runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime: the extra onnx")
    model, name, examples, sizes = reloaded(family, tmp_path, "reference")
    limits = {"seqlen": torch.export.Dim("seqlen", max=model.config.block_size)} if len(sizes) == 2 else {}
    shapes = {name: {index: limits.get(size, torch.export.Dim.AUTO) for index, size in sizes.items()}}
    program = torch.onnx.export(
        model, (), kwargs={name: examples[0]}, dynamo=True, dynamic_shapes=shapes, verbose=False
    )
    program.save(tmp_path / "model.onnx")
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    for example in examples:
        (logits,) = session.run(None, {name: example.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(logits), model(**{name: example}).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("family", ["crate_mae", "aot_regression"])
def test_onnx_runtime_computes_what_transformers_has_no_class_for(family, tmp_path):
    pytest.importorskip("onnxscript", reason="needs onnxscript: the extra onnx")
    runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime: the extra onnx")
    families.drawn(families.build(family)).save_pretrained(tmp_path)
    model, inputs = models.from_pretrained(tmp_path, backend="reference").eval(), families.inputs(family)
    program = torch.onnx.export(model, inputs, dynamo=True, verbose=False)
    program.save(tmp_path / "model.onnx")
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    tensors = [each.numpy() for each in inputs if each is not None]
    found = session.run(None, {slot.name: each for slot, each in zip(session.get_inputs(), tensors, strict=True)})
    with torch.no_grad():
        expected = model(*inputs)
    for result, wanted in zip(found, expected if isinstance(expected, tuple) else (expected,), strict=True):
        torch.testing.assert_close(torch.from_numpy(result), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["composite", None], ids=["composite", "best"])
@pytest.mark.parametrize("family", FAMILIES)
def test_torch_export_keeps_the_operators(family, backend, tmp_path):
    model, name, examples, _ = reloaded(family, tmp_path, backend)
    shapes = {name: {0: torch.export.Dim.AUTO}}
    with torch.no_grad():
        program = torch.export.export(model, (), {name: examples[0]}, dynamic_shapes=shapes)
        example = examples[0][[1, 0, 1]]
        result = program.module()(**{name: example}).logits
        torch.testing.assert_close(result, model(**{name: example}).logits)
    # Composite mssa is PyTorch's own operators; ista and tssa are ours on every backend but reference.
    kept = family != "aot_mhsa_lm" if backend is None else not family.startswith("aot")
    assert any("crate_kernels" in str(node.target) for node in program.graph.nodes) == kept


OPERATORS = {
    "ista": lambda backend: nn.ISTA(8, backend=backend),
    "overcomplete": lambda backend: nn.OvercompleteISTA(8, backend=backend),
    "tssa": lambda backend: nn.TSSA(8, 2, backend=backend),
    "causal-tssa": lambda backend: nn.CausalTSSA(8, 2, 8, backend=backend),
    "mssa": lambda backend: nn.MSSA(8, 2, 4, backend=backend),
}


# The older exporter warns of itself, and writes to the terminal.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "script"])
@pytest.mark.parametrize("build", OPERATORS.values(), ids=OPERATORS)
def test_onnx_names_the_backend_that_can_be_exported(build, dynamo, tmp_path):
    pytest.importorskip("onnxscript", reason="needs onnxscript: the extra onnx")
    backend = "cpp" if build is OPERATORS["mssa"] else "composite"  # whose mssa is PyTorch's operators
    if backend == "cpp" and backends.unavailable_reason("mssa", "cpp"):
        pytest.skip("needs the C++ extension: python -m crate_kernels build")
    model, x = build(backend).eval(), torch.randn(2, 3, 8)
    path = None if dynamo else tmp_path / "model.onnx"
    message = "fwd: ONNX has no such operator; export a model of backend='reference', such as models.from_pretrained"
    with pytest.raises((torch.onnx.errors.OnnxExporterError, NotImplementedError), match=message):
        torch.onnx.export(model, (x,), path, dynamo=dynamo, verbose=False)
    assert model(x).shape == x.shape  # only there


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_the_named_backend_can_be_exported():
    pytest.importorskip("onnxscript", reason="needs onnxscript: the extra onnx")
    program = torch.onnx.export(OPERATORS["ista"]("reference").eval(), (torch.randn(2, 8),), dynamo=True, verbose=False)
    assert "crate_kernels" not in {node.domain for node in program.model.graph}
