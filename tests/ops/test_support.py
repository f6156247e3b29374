"""The tables of docs/support.md: every call in them is made, on every backend of this machine."""

import builtins
import functools
import inspect
import re
from pathlib import Path

import pytest
import torch

import crate_kernels
from crate_kernels import testing
from tests.ops.common import VARIATION, backends, home

PAGE = (Path(__file__).parents[2] / "docs" / "support.md").read_text()
SETUP = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL).group(1)
COLUMNS = ("reference", "composite", "cpp", "triton")
OPERATORS = sorted(testing.SPECS)
# PyTorch warns of vmap over functions without a batching rule.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


def rows(*header):
    """Yield the rows of the tables that begin with ``header``, as lists of cells."""
    inside = False
    for line in PAGE.splitlines():
        cells = [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells == list(header):
            inside = True
        elif inside and not cells:
            inside = False
        elif inside and not set(cells[0]) <= set("-: "):
            yield cells


def names(backend):
    """Return what the page's example defines, with operators that run on ``backend`` where a call names none."""
    space = {}
    with torch.device(home(backend)):
        exec(SETUP, space)
    return space | {op: functools.partial(getattr(crate_kernels, op), backend=backend) for op in OPERATORS}


# Where Triton is interpreted every other call is left to make test-all: its kernels are those of the named cases.
SUPPORTED = [
    pytest.param(
        *(call.strip("`"), backend, answer == "yes"),
        id=f"{call.strip('`')}-{backend}",
        marks=VARIATION if n % 2 else (),
    )
    for n, (call, *answers) in enumerate(rows("call", *COLUMNS))
    for column, answer in zip(COLUMNS, answers, strict=True)
    for backend in ((column, "emulated") if column == "cpp" else (column,))
    if any(p.values == (backend, home(backend)) for p in backends("mssa"))
]
REFUSED = [
    pytest.param(call.strip("`"), error.strip("`"), says, id=call.strip("`"))
    for call, error, says, _ in rows("call", "error", "says", "why")
]


@pytest.mark.parametrize(("call", "backend", "supported"), SUPPORTED)
def test_support_is_as_the_tables_say(call, backend, supported):
    space = names(backend)
    if not supported:
        with pytest.raises(NotImplementedError, match=r"use backend='(composite|reference)'"):
            eval(call, space)
        return
    result = eval(call, space)
    result = result[0] if isinstance(result, tuple) else result
    assert result.isfinite().all()
    if "detach" not in call and "torch.func" not in call:
        result.float().sum().backward()
        leaves = [t for t in space.values() if isinstance(t, torch.Tensor) and t.grad is not None]
        assert leaves
        assert all(t.grad.isfinite().all() for t in leaves)


@pytest.mark.parametrize(("call", "error", "says"), REFUSED)
def test_refusals_are_as_the_table_says(call, error, says):
    with pytest.raises(getattr(builtins, error), match=re.escape(says)):
        eval(call, names("composite"))


@pytest.mark.parametrize("op", OPERATORS)
def test_every_argument_is_in_the_tables(op):
    calls = " ".join(call for call, *_ in rows("call", *COLUMNS) if call.startswith(f"`{op}("))
    arguments = inspect.signature(getattr(crate_kernels, op)).parameters.values()
    keywords = {a.name for a in arguments if a.kind is a.KEYWORD_ONLY} - {"backend"}
    assert keywords == {name for name in keywords if f"{name}=" in calls}
