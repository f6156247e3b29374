"""The pages that people read: their fenced blocks, their inline code and their prose."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted(DOCS.glob("*.md")),
    *sorted(DOCS.glob("tutorials/*.md")),
]
_FENCED = re.compile(r"^(?P<indent> *)```(?P<language>.*)\n(?P<text>(?:.*\n)*?)(?P=indent)```$", re.MULTILINE)


class Block(NamedTuple):
    """A fenced block; ``line`` is that of its fence."""

    page: Path
    line: int
    language: str
    text: str


def name(page: Path) -> str:
    """Name a page as its test's id does: by its path in the repository."""
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> list[Block]:
    """Return the page's fenced blocks of these languages, or all of them."""
    text = page.read_text()
    found = [
        Block(page, text[: match.start()].count("\n") + 1, match["language"], match["text"])
        for match in _FENCED.finditer(text)
    ]
    return [block for block in found if not languages or block.language in languages]


def prose(page: Path) -> str:
    """Return the page without its fenced blocks."""
    return _FENCED.sub("", page.read_text())


def inline(page: Path) -> list[str]:
    """Return the code within sentences, each on one line."""
    return [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose(page))]


def program(page: Path) -> str:
    """Return the page's Python blocks as one program whose line numbers are the page's."""
    lines = [""] * (page.read_text().count("\n") + 1)
    for block in blocks(page, "python"):
        code = block.text.splitlines()
        lines[block.line : block.line + len(code)] = code
    return "\n".join(lines)


def run(page: Path, names: dict | None = None) -> dict:
    """Execute the page's Python blocks, top to bottom, in one namespace; return it."""
    namespace = {"__name__": page.stem, **(names or {})}
    exec(compile(program(page), str(page), "exec"), namespace)
    return namespace
