"""What is refused on a call that a plan repeats: options, tokens and parameters of a wrong type or shape."""

import numpy as np
import pytest
import torch

import crate_kernels as ck
from tests.ops.repeated import EACH, NEEDS_PLANS, hits, known, repeated_calls  # noqa: F401

pytestmark = NEEDS_PLANS


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mssa-causal", {"causal": 1}),
        ("mssa", {"return_lse": 0}),
        ("mssa", {"scale": True}),
        ("mssa", {"dropout_p": False}),
        ("tssa", {"return_membership": 0}),
        ("tssa", {"causal": torch.ones(2)}),
        ("tssa-bias", {"causal": np.ones(2)}),
        ("ista", {"nonnegative": 1}),
        ("ista", {"step_size": True}),
        ("mssa", {"scale": [1.0]}),
        ("mssa", {"scale": torch.ones(2)}),
        ("mssa", {"dropout_p": torch.ones(2)}),
    ],
)
def test_options_of_a_wrong_type_are_refused_on_a_repeated_call(name, options):
    call, make = known(name)
    with pytest.raises(TypeError, match=f"{next(iter(options))} must be"):
        call(*make(), **options)


EQUAL = {
    "mssa": (lambda w, _, number: ck.mssa(w, scale=number), "scale"),
    "tssa": (lambda w, _, number: ck.tssa(w, torch.ones(3), dropout_p=number), "dropout_p"),
    "ista": (lambda w, weight, number: ck.ista(w[0, 0], weight, step_size=number), "step_size"),
}


@pytest.mark.parametrize("name", EQUAL)
def test_an_option_that_equals_a_repeated_one_is_refused_by_its_type(name):
    function, option = EQUAL[name]
    w, weight = torch.randn(2, 3, 9, 16), torch.randn(16, 16)
    number = 0.0 if option == "dropout_p" else 1.0
    for _ in range(3):
        found, _ = hits(lambda: function(w, weight, number))
    assert found == 1
    with pytest.raises(TypeError, match=f"{option} must be"):
        function(w, weight, bool(number))


def test_a_length_without_offsets_is_not_asked_of_denom_bias():
    call, make = known("tssa-bias")
    w, temp = make()
    with pytest.raises(ValueError, match="tssa: w must be"):
        call(w[0], temp, max_seqlen="9")


WRONG = {
    "nested": lambda w: torch.nested.nested_tensor(list(w)),
    "jagged": lambda w: torch.nested.nested_tensor(list(w), layout=torch.jagged),
    "integers": torch.Tensor.long,
    "no-batch": lambda w: w[0],
    "a-list": torch.Tensor.tolist,
    "sparse": torch.Tensor.to_sparse,
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("name", "kind"), [(n, k) for n in EACH for k in WRONG if not (n.startswith("ista") and k == "no-batch")]
)
def test_tokens_of_a_wrong_kind_are_refused_on_a_repeated_call(name, kind):
    call, make = known(name)
    tokens, *others = make()
    with pytest.raises(
        (TypeError, ValueError, NotImplementedError, RuntimeError), match=r"(mssa|tssa): w|ista.*: x|parse"
    ):
        call(WRONG[kind](tokens), *others)


@pytest.mark.parametrize("name", EACH[1:])
def test_parameters_of_a_wrong_shape_are_refused_on_a_repeated_call(name):
    call, make = known(name)
    tokens, parameter = make()
    with pytest.raises(ValueError, match="must"):
        call(tokens, parameter[:-1])


TEMPS = {
    "row": lambda t: t[None],
    "fewer": lambda t: t[:2, None],
    "double": lambda t: t.double()[:, None],
    "elsewhere": lambda t: t[:, None].to("meta"),
}


@pytest.mark.parametrize("change", TEMPS.values(), ids=TEMPS)
def test_temps_of_another_kind_are_refused_on_a_repeated_call(change):
    call, make = known("tssa")
    w, temp = make()
    for _ in range(3):
        assert call(w, temp[:, None]).shape == w.shape
    with pytest.raises((TypeError, ValueError, NotImplementedError), match="tssa: temp must"):
        call(w, change(temp))
