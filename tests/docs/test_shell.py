"""Every command that a page shows: its program is here, and its parser takes the options, without running it."""

import argparse
import ast
import functools
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
import torch.distributed.run

from tests.docs import pages
from tests.integrations import vision_schemas  # noqa: F401 (torchvision can be imported)

MEANT = {"N": "1", "NAME": "denoise", "SUBCOMMAND": "info"}  # words of prose in the place of a value
SLOW, TRAINER = pytest.mark.exhaustive, re.compile("^accelerate|_trainer.py")  # imports transformers' Trainer
EXTRAS = re.compile(r"^\.(?:\[([\w,-]+)\])?$")


class Parsed(Exception):
    """A program has read its arguments and would now begin."""


def commands(text):
    """Return the commands of a shell block, each as its words, without comments and environment variables."""
    lines = text.replace("\\\n", " ").splitlines()
    every = (shlex.split(line, comments=True) for line in lines)
    return [command for words in every if (command := without_variables(words))]


def without_variables(words):
    named = [re.match(r"\w+=", word) is None for word in words]
    return words[named.index(True) :] if True in named else []


def shown():
    """Return every command in a block or a sentence, each once, by its text."""
    found = {}
    for page in pages.PAGES:
        every = [command for block in pages.blocks(page, "sh") for command in commands(block.text)]
        for code in pages.inline(page):
            if code.startswith(tuple(f"{program} " for program in PROGRAMS)) or re.match(r"\w+=\S+ pytest ", code):
                every += commands(code)
        for command in every:
            found[shlex.join(command)] = command
    return found


def in_sources():
    """Return every command in a docstring of the package, its benchmarks and examples, each once, by its text.

    It is in double backticks, or an indented line. What a message says to install counts too.
    """
    found = {}
    programs = "|".join(map(re.escape, PROGRAMS))
    for path in (
        path for folder in ("crate_kernels", "benchmarks", "examples") for path in (pages.ROOT / folder).rglob("*.py")
    ):
        text = path.read_text()
        every = re.findall(r"[^`](pip install [\w-]+)", text)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (said := ast.get_docstring(node)):
                every += [" ".join(code.split()) for code in re.findall(rf"``((?:{programs}) [^`]+)``", said)]
                every += re.findall(
                    rf"^    ((?:\w+=\S+ )?(?:{programs}) \S.*)$", said.replace("\\\n", " "), re.MULTILINE
                )
        for command in (command for code in every for command in commands(code)):
            found[shlex.join(command)] = command
    return found


def stop_after_parsing(monkeypatch):
    parse = argparse.ArgumentParser.parse_args

    def parsed(self, args=None, namespace=None):
        parse(self, args, namespace)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)


def python(words, monkeypatch):
    """Check an option with the parser of a module or a script, which exits if it does not know an option."""
    if words[:2] == ["-m", "pytest"]:
        return collected(words[2:])
    if words[:2] == ["-m", "pip"]:
        return pip(words[2:])
    program, options = (pages.ROOT / words[0], words[1:]) if words[0] != "-m" else (source(words[1]), words[2:])
    text = program.read_text()
    if "parse_args(" not in text and "import main" not in text:
        assert not options, f"{program} takes no options"
        return
    monkeypatch.syspath_prepend(program.parent)
    monkeypatch.setattr(sys, "argv", [str(program), *(MEANT.get(word, word) for word in options)])
    stop_after_parsing(monkeypatch)
    with pytest.raises(Parsed):
        runpy.run_path(str(program), run_name="__main__")
    monkeypatch.undo()


def source(module):
    """Return the file that ``python -m`` executes."""
    found = find_spec(module)
    assert found is not None, f"there is no module {module}"
    return Path(found.origin).with_name("__main__.py") if found.submodule_search_locations else Path(found.origin)


def collected(words):
    """Check that the files of a call of pytest exist; ``test_pytest_takes_the_options`` does its options."""
    for word in words:
        assert not word.startswith(("tests/", "benchmarks")) or list(pages.ROOT.glob(word)), word
    for flag, plugin in pairwise(words):
        assert flag != "-p" or find_spec(plugin), plugin


def pip(words):
    """Check the extras of an installation, and what a build requires, against pyproject.toml."""
    assert words[0] == "install"
    if "--require-hashes" in words or "--target" in words:
        return
    words = [word for word in words[1:] if word not in ("-e", "-c", "constraints.txt", "--no-build-isolation")]
    for word in set(words) - required() - named():
        found = EXTRAS.match(word)
        assert found, f"pip install {word}"
        for extra in (found[1] or "").split(",") if found[1] else ():
            assert extra in extras(), extra


@functools.cache
def required():
    """Return what pyproject.toml requires of a build."""
    section = (pages.ROOT / "pyproject.toml").read_text().partition("[build-system]\n")[2].partition("\n[")[0]
    return set(re.findall(r'^ +"([^"]+)"', section, re.MULTILINE))


@functools.cache
def named():
    """Return the packages that pyproject.toml names anywhere."""
    return set(re.findall(r'^ +"([\w-]+)[>=]', (pages.ROOT / "pyproject.toml").read_text(), re.MULTILINE))


@functools.cache
def extras():
    """Return the names of the extras: Python 3.10 has no tomllib."""
    text = (pages.ROOT / "pyproject.toml").read_text()
    section = text.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    return set(re.findall(r"^(\w+) = \[", section, re.MULTILINE))


def make(words, monkeypatch):
    """Check targets and variables against the Makefile, and what a target would run by the parsers of that."""
    variables = [word for word in words if "=" in word]
    recipe = dry_run(*words)
    for variable in variables:
        others = [word for word in words if word != variable]
        assert dry_run(*others, variable.partition("=")[0] + "=--unlike") != dry_run(*others), variable
    for line in recipe.replace("\\\n", " ").splitlines():
        for called in re.findall(r"(?:^|\s)(?:\.venv/bin/python|python3) (-m .*)", line):
            if called.startswith(("-m crate_kernels", "-m tests", "-m benchmarks", "-m pytest")):
                python(shlex.split(called), monkeypatch)


@functools.cache
def dry_run(*words):
    """Return what make would run."""
    return printed("make", "-n", *words)


def printed(*words):
    """Return what a command prints; the make, its variables and the pytest that run the tests are hidden from it."""
    hidden = ("MAKE", "MFLAGS", "PYTEST", "ARGS", "MINUTES", "OUT")
    outside = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    done = subprocess.run(words, cwd=pages.ROOT, env=outside, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def torchrun(words, monkeypatch):
    found = torch.distributed.run.get_args_parser().parse_args(words)
    python([found.training_script, *found.training_script_args], monkeypatch)


def accelerate(words, monkeypatch):
    launch = pytest.importorskip("accelerate.commands.launch", reason="needs accelerate: the extra hf")
    assert words[0] == "launch"
    if words[1:]:
        found = launch.launch_command_parser().parse_args(words[1:])
        python([found.training_script, *found.training_script_args], monkeypatch)


def tool(words, monkeypatch):
    """Pass what is not ours: there is nothing here to compare it with."""


def ci(words, monkeypatch):
    assert os.access(pages.ROOT / ".ci" / "run", os.X_OK)


PROGRAMS = {
    "make": make,
    "python": python,
    ".venv/bin/python": python,
    "pytest": lambda words, monkeypatch: collected(words),
    "pip": lambda words, monkeypatch: pip(words),
    "torchrun": torchrun,
    "accelerate": accelerate,
    ".venv/bin/ruff": tool,
    "ln": tool,
    ".ci/run": ci,
}
SHOWN = shown() | in_sources()


@pytest.mark.parametrize(
    "command",
    [pytest.param(words, marks=SLOW if TRAINER.search(each) else (), id=each) for each, words in SHOWN.items()],
)
def test_command_parses(command, monkeypatch):
    program, *words = command
    if program == "make" and not shutil.which("make"):
        pytest.skip("needs make")
    PROGRAMS[program](words, monkeypatch)


def test_a_wrong_command_is_refused(monkeypatch):
    for command in ("pip install '.[none]'", "pip install nonesuch", "python -m crate_kernels info --nonesuch"):
        (words,) = commands(command)
        with pytest.raises((AssertionError, SystemExit)):
            PROGRAMS[words[0]](words[1:], monkeypatch)
        monkeypatch.undo()


def known_options():
    """Return every option that a program of this tree declares."""
    folders = ("crate_kernels", "tests", "benchmarks", "examples")
    sources = (path.read_text() for folder in folders for path in (pages.ROOT / folder).rglob("*.py"))
    return {found for text in sources for found in re.findall(r'add_?(?:argument|option)\(\s*"(--[\w-]+)"', text)}


def test_options_in_sentences_exist():
    theirs = {"--max-restarts"}  # torchrun's
    spoken = {
        option for page in pages.PAGES for code in pages.inline(page) for option in re.findall(r"^--[\w-]+", code)
    }
    assert len(spoken) > 10
    assert spoken <= known_options() | theirs


def test_an_install_without_isolation_has_what_its_build_requires():
    """It compiles nothing, in silence, where pip did not install ninja first."""
    shown = list(pages.inline(pages.DOCS / "cpu.md"))
    first = shown.index(f"pip install {shlex.join(sorted(required()))}")
    assert shown[first + 1] == "pip install --no-build-isolation ."


# The package is on no index: whoever registers its name there would be installed instead. Extras of pyproject.toml that
# name others are of this tree.
PUBLISHED = re.compile(
    r"\b(?:pipx?|uv|conda)\b.{0,40}\b(?:install|add)\b[^`\n]*\bcrate[-_]kernels|crate-kernels\[|pypi\.org/\S*crate"
)
TREE = ("crate_kernels", "csrc", "tests", "docs", "benchmarks", "examples", ".github", ".ci")


def test_nothing_is_installed_by_a_name_that_others_could_register():
    texts = [path for path in pages.ROOT.iterdir() if path.is_file() and path.name != "pyproject.toml"]
    for folder in TREE:
        texts += [path for path in (pages.ROOT / folder).rglob("*") if path.is_file() and "_build" not in path.parts]
    assert len(texts) > 500
    found = [
        f"{path.relative_to(pages.ROOT)}: {match[0]}"
        for path in texts
        if path != Path(__file__) and path.suffix not in (".png", ".pyc", ".so")
        for match in PUBLISHED.finditer(path.read_text(errors="ignore"))
    ]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "pip install 'crate-kernels[hf]'",
        "python -m pip install crate-kernels",
        "pip install -U crate_kernels",
        "uv add crate-kernels",
        "https://pypi.org/project/crate-kernels/",
    ],
)
def test_what_others_could_register_is_seen(text):
    assert PUBLISHED.search(text)


@pytest.mark.exhaustive
@pytest.mark.parametrize("folder", ["tests", "benchmarks"])
def test_pytest_takes_the_options(folder):
    """The options of all calls together, as each costs a process."""
    calls = {shlex.join(words) for program, *words in SHOWN.values() if program == "pytest"}
    for words in SHOWN.values():
        if words[0] == "make":
            calls |= set(re.findall(r"-m pytest (.*)", dry_run(*words[1:]).replace("\\\n", " ")))
    words = [
        word
        for call in sorted(calls)
        if ("benchmarks" in call) == (folder == "benchmarks")
        for word in shlex.split(call)
    ]
    assert len(words) > 8
    assert "@pytest.mark.exhaustive" in printed(sys.executable, "-m", "pytest", *words, "--markers")
