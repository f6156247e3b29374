"""Our models as ExecuTorch and other runtimes of core ATen operators take them, with ``backend="reference"``."""

import pytest
import torch

from tests.models.families import FAMILIES, build, drawn, inputs, output


@pytest.mark.exhaustive  # an export takes seconds; docs/export.md has that of a CRATE
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_decomposes_into_core_operators(family):
    model, tensors = drawn(build(family, backend="reference")).eval(), inputs(family)
    with torch.no_grad():
        program = torch.export.export(model, tensors).run_decompositions()
        found, expected = (output(family, each(*tensors)) for each in (program.module(), model))
    torch.testing.assert_close(found, expected)
    targets = {node.target for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    others = {str(target) for target in targets if torch.Tag.core not in target.tags}
    assert others <= {"aten._assert_tensor_metadata.default"}  # which to_edge() removes
