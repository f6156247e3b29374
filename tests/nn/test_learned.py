"""ISTA with a learned step size, threshold or bias, against the users' own modules; complex tokens are refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize
from torch.testing import assert_close

from crate_kernels.models.crate_lm import TiedISTA
from crate_kernels.nn import ISTA, MSSA, TSSA, CausalMSSA, CausalTSSA, OvercompleteISTA
from tests.nn.test_nn import DIM, HEADS, built, tokens

ATOMS = 20
NAMES = ("step_size", "lambd", "bias")


def square(m, x):
    moved = x + m.step_size * (x @ m.weight - x @ m.weight.T @ m.weight)
    return moved if m.bias is None else moved + m.bias


def mm(m, x):
    moved = (1 + 4 / 18) * (x @ m.weight) - 4 * m.lambd / 9
    return F.relu(moved if m.bias is None else moved + m.bias)


def soft(m, x):
    moved = square(m, x)
    return torch.sign(moved) * F.relu(moved.abs() - m.step_size * m.lambd)


def overcomplete(m, x):
    code = torch.zeros(*x.shape[:-1], ATOMS, dtype=x.dtype)
    for _ in range(2):
        code = code + m.step_size * ((x - code @ m.D.T) @ m.D) - m.step_size * m.lambd
        code = F.relu(code if m.bias is None else code + m.bias)
    return code @ m.D1.T


MODULES = {
    "nonnegative": (lambda **k: ISTA(DIM, **k), lambda m, x: F.relu(square(m, x) - m.step_size * m.lambd)),
    "soft": (lambda **k: ISTA(DIM, prox="soft", **k), soft),
    "mm": (lambda **k: ISTA(DIM, prox="mm", **k), mm),
    "overcomplete": (lambda **k: OvercompleteISTA(DIM, ATOMS, **k), overcomplete),
}
CASES = [
    pytest.param(*MODULES[name], learned, per_channel, id=f"{name}-{'-'.join(learned)}-{per_channel}")
    for name in MODULES
    for learned in (("step_size",), ("lambd",), ("bias",), NAMES)
    for per_channel in (False, True)
    if name != "mm" or "step_size" not in learned
]


@pytest.mark.parametrize(("make", "formula", "learned", "per_channel"), CASES)
def test_a_learned_module_is_what_users_write(make, formula, learned, per_channel):
    module = make(learned=learned, per_channel=per_channel, step_size=0.3, lambd=0.2)
    width = ATOMS if isinstance(module, OvercompleteISTA) else DIM
    for name in learned:
        start = {"step_size": 0.3, "lambd": 0.2, "bias": 0.0}[name]
        assert torch.equal(getattr(module, name), torch.full((width,) if per_channel else (), start))
    fixed = [name for name in NAMES if name not in learned]
    assert not {*fixed} & {*module.state_dict()}
    module, results = built(module), []
    for function in (module, lambda x: formula(module, x)):
        module.zero_grad()
        x = tokens().requires_grad_()
        function(x).square().sum().backward()
        results.append([x.grad, *(p.grad for p in module.parameters())])
    assert_close(*results)
    assert all(gradient is not None for gradient in results[0])


class Positive(nn.Module):
    def forward(self, raw):
        return raw.exp()


def test_a_learned_number_is_kept_positive_by_a_parametrization():
    module = ISTA(DIM, learned=("step_size",), per_channel=True)
    parametrize.register_parametrization(module, "step_size", Positive())
    assert {name for name, _ in module.named_parameters()} == {"weight", "parametrizations.step_size.original"}
    module, x = built(module), tokens()
    assert_close(module(x), F.relu(square(module, x) - module.step_size * 0.1))
    module(x).sum().backward()
    assert module.parametrizations.step_size.original.grad.abs().sum() > 0


def test_a_learned_module_trains_and_reloads():
    torch.manual_seed(0)
    module, x = ISTA(DIM, learned=NAMES, per_channel=True), torch.randn(2, 5, DIM)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(x).square().sum().backward()
    optimizer.step()
    again = ISTA(DIM, learned=NAMES, per_channel=True)
    again.load_state_dict(module.state_dict())
    assert torch.equal(again(x), module(x))
    assert not torch.equal(module.lambd, torch.full((DIM,), 0.1))


def test_learned_terms_of_a_map_are_of_its_channels():
    options = {"learned": NAMES, "per_channel": True}
    module, plain = (built(ISTA(DIM, **options, data_format=f"channels_{end}")) for end in ("first", "last"))
    x = tokens(2, DIM, 3, 5)
    assert_close(module(x).permute(0, 2, 3, 1), plain(x.permute(0, 2, 3, 1)))


BAD = {
    "name": (
        lambda: ISTA(DIM, learned=("eta",)),
        ValueError,
        "learned must be among step_size, lambd, bias, got 'eta'",
    ),
    "string": (lambda: ISTA(DIM, learned="lambd"), TypeError, "ISTA: learned must be a tuple of names, got the string"),
    "bool": (lambda: ISTA(DIM, learned=True), TypeError, "ISTA: learned must be a tuple of names, got bool"),
    "per-channel": (
        lambda: ISTA(DIM, per_channel=True),
        ValueError,
        "ISTA: learned must name a parameter with per_channel=True, got none",
    ),
    "number": (
        lambda: OvercompleteISTA(DIM, learned=1),
        TypeError,
        "OvercompleteISTA: learned must be a tuple of names",
    ),
    "mm": (lambda: ISTA(DIM, prox="mm", learned=["step_size"]), ValueError, "learned must not have 'step_size'"),
    "flag": (lambda: OvercompleteISTA(DIM, per_channel=1), TypeError, "OvercompleteISTA: per_channel must be a bool"),
}


@pytest.mark.parametrize(("call", "error", "message"), BAD.values(), ids=BAD)
def test_bad_options(call, error, message):
    with pytest.raises(error, match=message):
        call()


COMPLEX = {
    "mssa": lambda: MSSA(DIM, HEADS, 4),
    "tssa": lambda: TSSA(DIM, HEADS),
    "causal-mssa": lambda: CausalMSSA(DIM, HEADS),
    "causal-tssa": lambda: CausalTSSA(DIM, HEADS, 9),
    **{name: make for name, (make, _) in MODULES.items()},
    "learned": lambda: ISTA(DIM, learned=NAMES),
    "map": lambda: ISTA(DIM, data_format="channels_first"),
}


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature:UserWarning")
@pytest.mark.parametrize("make", COMPLEX.values(), ids=COMPLEX)
def test_complex_tokens_are_refused_by_name(make):
    x = tokens(2, DIM, 3, 5) if getattr(make(), "data_format", "") == "channels_first" else tokens()
    for module in (make().double(), make().to(torch.complex128)):
        with pytest.raises(ValueError, match=r"\w+: x must have a floating dtype, got torch.complex128"):
            module(x + 0j)


PRINTED = (
    "ISTA(4, step_size=0.1, lambd=0.1)",
    "ISTA(4, step_size=0.1, lambd=0.5, prox='soft')",
    "ISTA(4, step_size=0.1, lambd=0.1, prox='mm', alpha=2.0)",
    "ISTA(4, step_size=0.1, learned=('lambd',))",
    "ISTA(4, learned=('step_size', 'lambd', 'bias'), per_channel=True, data_format='channels_first')",
    "OvercompleteISTA(4, 16, 2, step_size=0.1, lambd=0.1)",
    "OvercompleteISTA(4, 8, 3, lambd=0.1, tied=True, learned=('step_size', 'bias'))",
)


@pytest.mark.parametrize("text", PRINTED)
def test_a_module_prints_the_arguments_that_make_it(text):
    module = eval(text, {"ISTA": ISTA, "OvercompleteISTA": OvercompleteISTA})
    assert repr(module) == text


def test_a_parametrized_number_prints_as_learned():
    module = ISTA(4, learned=("step_size",), per_channel=True)
    parametrize.register_parametrization(module, "step_size", nn.Softplus())
    assert "(4, lambd=0.1, learned=('step_size',), per_channel=True" in repr(module).replace("\n  ", "")


def test_a_tied_step_of_a_language_model_prints_its_numbers():
    assert repr(TiedISTA(4, 16)).startswith("TiedISTA(\n  4, 16, steps=2, step_size=0.1, lambd=0.1\n  (code)")
