"""Per-sample gradients of whole models: by vmap over grad, and by opacus."""

import pytest
import torch
from torch.func import functional_call, grad, vmap

from tests.models.families import FAMILIES, build, drawn, inputs, output

VISION = ("crate", "crate_alpha", "aot_vision")  # ToST has batch norms, which mix the samples


def setting(family):
    model = drawn(build(family)).eval()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters, *sample):
        return output(family, functional_call(model, parameters, tuple(s[None] for s in sample))).sin().sum()

    return model, parameters, loss, inputs(family, batch=3)


# ToST's class attention is PyTorch's own, which is a loop under vmap.
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("family", [f for f in FAMILIES if not f.startswith("crate_mae")])
def test_vmap_of_a_gradient_is_each_samples_gradient(family):
    _, parameters, loss, given = setting(family)
    found = vmap(grad(loss), (None, *(0 for _ in given)))(parameters, *given)
    each = [grad(loss)(parameters, *(g[i] for g in given)) for i in range(3)]
    expected = {name: torch.stack([one[name] for one in each]) for name in parameters}
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")  # opacus's, of images
@pytest.mark.parametrize("family", VISION)
def test_opacus_takes_the_gradient_of_each_sample(family):
    opacus = pytest.importorskip("opacus", reason="needs opacus")
    model, parameters, loss, (images,) = setting(family)
    each = [grad(loss)(parameters, image) for image in images]
    wrapped = opacus.GradSampleModule(model.train(), loss_reduction="sum")
    output(family, wrapped(images)).sin().sum().backward()
    for name, p in model.named_parameters():
        expected = torch.stack([one[name] for one in each])
        torch.testing.assert_close(p.grad_sample, expected, rtol=1e-4, atol=1e-5)
