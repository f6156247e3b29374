"""The rules of the house, read from the sources: where imports point, where options are listed, where names belong."""

import ast
import graphlib
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from crate_kernels import testing

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "crate_kernels"
SOURCES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "__main__.py"]
# Imports go down only; packages of one floor may import each other.
FLOORS = (
    {"cli"},
    {"experiments"},
    {"bench"},
    {"testing"},
    {"__init__"},
    {"_patch", "distributed", "integrations", "models"},
    {"nn"},
    {"analysis", "ops"},
    {"_cuda", "_triton"},
    {"_core"},
    {"_native"},
)
FLOOR = {package: number for number, packages in enumerate(FLOORS) for package in packages}
BACKENDS = ("reference", "composite", "native", "triton")
MAX_PARAMETERS = 8
MAX_OF_A_KERNEL = 30


def name(path):
    """Return the dotted name of a module below the package."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


@cache
def nodes(path):
    return list(ast.walk(ast.parse(path.read_text())))


def imports(path):
    """List what a file imports from the package, by dotted names below it."""
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").startswith("crate_kernels"):
            below = node.module.removeprefix("crate_kernels").lstrip(".")
            yield from (f"{below}.{alias.name}".lstrip(".") for alias in node.names)


def package_of(module):
    first = module.partition(".")[0]
    return first if first in FLOOR else "__init__"


def test_imports_go_down_only():
    up = [
        f"{name(path)} imports {module}"
        for path in SOURCES
        for module in imports(path)
        if FLOOR[package_of(module)] < FLOOR[package_of(name(path))]
    ]
    assert up == []


def test_imports_form_no_circle():
    """Imports for type checkers count too: two modules that need each other are one."""
    modules = {name(path).removesuffix(".__init__") for path in SOURCES}
    graph = {
        name(path).removesuffix(".__init__"): {
            module if module in modules else module.rpartition(".")[0] for module in imports(path)
        }
        for path in SOURCES
    }
    order = list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError
    assert modules <= set(order)


def test_no_backend_imports_another():
    across = []
    for path in SOURCES:
        first, *place = name(path).split(".")
        if first != "ops" or len(place) < 2 or place[1] not in BACKENDS or place[-1] == "tune":
            continue  # tuning checks a kernel against PyTorch
        others = [f"ops.{place[0]}.{backend}" for backend in BACKENDS if backend != place[1]]
        across += [f"{name(path)} imports {m}" for m in imports(path) if m.startswith(tuple(others))]
    assert across == []


def test_options_have_names():
    """An integer index into the options or arguments of a call would be a second list of them."""
    indexed = [
        f"{name(path)}:{node.lineno} {ast.unparse(node)}"
        for path in SOURCES
        for node in nodes(path)
        if isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("call", "options", "rest", "FORM", "TERMS")
        and re.search(r"\d", ast.unparse(node.slice))
    ]
    assert indexed == []


def parameters(function):
    return function.args.posonlyargs + function.args.args + function.args.kwonlyargs


def is_kernel(function):
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def test_parameter_lists_are_short():
    """Only public functions and kernels list more: what is inside takes the record of a call."""
    long = [
        f"{name(path)}.{node.name}"
        for path in SOURCES
        for node in nodes(path)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and len([a for a in parameters(node) if a.arg not in ("self", "cls")]) > MAX_PARAMETERS
        and not is_kernel(node)
        and path.name != "api.py"
        and package_of(name(path)) not in ("models", "nn")
    ]
    assert long == []


def listed_after(text, name):
    """Split the parameters of the C++ function whose head follows, by the commas between them."""
    text = text[text.index(f"{name}(") + len(name) + 1 :]
    depth, found = 0, [""]
    for char in text:
        if char == ")" and depth == 0:
            return [one for one in found if one.strip()]
        depth += (char in "(<") - (char in ")>")
        if char == "," and depth == 0:
            found.append("")
        else:
            found[-1] += char
    raise ValueError(f"the parameters of {name} do not end")


def cuda_kernels(text):
    """Yield the kernels of a header by name, with their parameters."""
    text = re.sub(r"//[^\n]*", " ", text)
    for match in re.finditer(r"__global__\b[^;{}]*?\b(\w+_kernel)\(", text):
        yield match[1], listed_after(text[match.start() :], match[1])


def test_kernels_take_records():
    """Options of a kernel are fields of a record; what is beside it, in Triton or CUDA, is read at once."""
    triton = {
        f"{name(path)}.{node.name}": len(parameters(node))
        for path in SOURCES
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef) and is_kernel(node)
    }
    cuda = {
        f"{path.relative_to(ROOT)} {kernel}": len(found)
        for path in sorted((ROOT / "csrc").rglob("*.cuh"))
        for kernel, found in cuda_kernels(path.read_text())
    }
    defined = sum(path.read_text().count("__global__ ") for path in (ROOT / "csrc").rglob("*.cuh"))
    assert len(triton) > 60
    assert len(cuda) == defined > 30
    assert min(cuda.values()) > 0
    assert {kernel: n for kernel, n in (triton | cuda).items() if n > MAX_OF_A_KERNEL} == {}


def test_class_names_are_unique():
    """A name that is found once is found: two records ``Call`` send a reader to the wrong file."""
    places = defaultdict(list)
    for path in SOURCES:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name(path))
    assert {found: where for found, where in places.items() if len(where) > 1} == {}


def cpp_types(text):
    """Yield the types that C++ defines, by name and whether inside another type; specialisations are left out."""
    text = re.sub(r'//[^\n]*|"(?:\\.|[^"\\])*"', " ", text)
    opens = (
        r"\b(?:enum\s+class|enum|struct|class|union)\s+(?:alignas\([^)]*\)\s+)?(\w+)\s*(?:final\s*)?"
        r"(<[^;{}()]*>)?\s*(?::(?!:)[^{;]*)?\{|[{}]"
    )
    scopes = []  # True: of a type
    for match in re.finditer(opens, text):
        if match[0] == "}":
            scopes.pop()
            continue
        if match[1] and not match[2]:
            yield match[1], any(scopes)
        scopes.append(bool(match[1]))


def test_cpp_type_names_are_unique():
    """Types inside others may share a name with each other, as those of interchangeable policies do."""
    places = defaultdict(list)
    for path in sorted((ROOT / "csrc").rglob("*.*")):
        for found, inner in cpp_types(path.read_text()):
            places[found].append((inner, str(path.relative_to(ROOT))))
    assert len(places) > 100
    twice = {found: where for found, where in places.items() if len(where) > 1 and not all(inner for inner, _ in where)}
    assert twice == {}


def listed(path):
    """Return the lines of the one list of operators."""
    lists = [n for n in nodes(path) if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "OPS"]
    return {line for n in lists for line in range(n.lineno, n.end_lineno + 1)}


def test_operators_are_named_in_their_packages():
    """A new operator is a new package and a line in OPS: no code that serves all operators asks which one it is."""
    named = [
        f"{name(path)}:{node.lineno} {node.value!r}"
        for path in SOURCES
        if package_of(name(path)) in ("_core", "_cuda", "_native", "_triton", "bench", "cli", "testing")
        for node in nodes(path)
        if isinstance(node, ast.Constant) and node.value in testing.SPECS and node.lineno not in listed(path)
    ]
    assert named == []


def interpreted(path):
    """Yield the tests of a file that are skipped where Triton is not interpreted."""
    body, said = ast.parse(path.read_text()).body, "TRITON_INTERPRET=1"
    saying = [node for node in body if isinstance(node, (ast.Assign, ast.If)) and said in ast.unparse(node)]
    marks = {ast.unparse(node.targets[0]) for node in saying if isinstance(node, ast.Assign)}
    whole = "pytestmark" in marks or any(isinstance(node, ast.If) for node in saying)
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            own = [ast.unparse(mark) for mark in node.decorator_list]
            if whole or any(mark in marks or said in mark for mark in own):
                yield node.name


def test_what_is_interpreted_is_chosen_by_its_name():
    """``make test`` runs the tests named triton again, in a process that interprets it."""
    names = [f"{path.name}::{test}" for path in (ROOT / "tests/ops").rglob("test_*.py") for test in interpreted(path)]
    assert len(names) > 40
    assert [name for name in names if "triton" not in name] == []


@pytest.mark.parametrize("folder", ["crate_kernels", "csrc", "tests", "docs", "benchmarks", "examples"])
def test_every_file_that_is_named_exists(folder):
    path = re.compile(
        r"(?<![\w/.*{}<>-])(?:csrc|tests|benchmarks|docs|crate_kernels/(?!csrc))/?[\w/.-]+\.(?:py|cpp|h|cuh?|md|json)\b"
    )
    texts = [p for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".cpp", ".h", ".cuh", ".md", ".rst")]
    missing = {
        f"{text.relative_to(ROOT)}: {found}"
        for text in texts
        if "_build" not in text.parts
        for found in path.findall(text.read_text())
        if not (ROOT / found).exists()
    }
    assert missing == set()


def test_no_file_has_marks_of_a_conflict():
    folders = [ROOT / name for name in ("benchmarks", "crate_kernels", "csrc", "docs", "examples", "tests")]
    paths = [
        path for folder in folders for path in folder.rglob("*") if path.suffix in (".cpp", ".cuh", ".h", ".md", ".py")
    ]
    assert len(paths) > 500
    assert [path for path in paths if re.search("^(<{7}|>{7}) ", path.read_text(), re.MULTILINE)] == []
