"""What is cited: this software by its version and licence, and each paper once."""

import re

import crate_kernels
from tests.docs import pages

CITATION = dict(re.findall(r"^([\w-]+): (.+)$", (pages.ROOT / "CITATION.cff").read_text(), re.MULTILINE))
PROJECT = (pages.ROOT / "pyproject.toml").read_text()


def test_the_citation_agrees_with_the_package():
    assert CITATION["version"] == crate_kernels.__version__
    assert CITATION["title"] == "crate_kernels"
    assert f'license = "{CITATION["license"]}"' in PROJECT
    (author,) = re.findall(r"^  - name: (.+)$", (pages.ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert f'authors = [{{ name = "{author}" }}]' in PROJECT
    assert CITATION.keys() & {"doi", "url", "repository-code"} == set()  # none is registered


def test_every_paper_that_a_source_names_is_cited():
    named = {
        number
        for path in (pages.ROOT / "crate_kernels" / "models").rglob("*.py")
        for number in re.findall(r"arXiv (\d{4}\.\d{5})", path.read_text())
    }
    page = (pages.DOCS / "papers.md").read_text()
    assert named == set(re.findall(r"\[arXiv (\d{4}\.\d{5})\]", page))
    cited = (pages.ROOT / "CITATION.cff").read_text()
    assert named == set(re.findall(r"arXiv:(\d{4}\.\d{5})", cited))
    titles = [
        title.replace("{", "").replace("}", "") for title in re.findall(r"^  title +=\s+{(.+)},$", page, re.MULTILINE)
    ]
    years = re.findall(r"^  year +=\s+{(\d+)}", page, re.MULTILINE)
    assert titles == re.findall(r'^    title: "(.+)"$', cited, re.MULTILINE)
    assert years == re.findall(r"^    year: (\d+)$", cited, re.MULTILINE)
    assert len(re.findall(r"^@\w+\{\w+,$", page, re.MULTILINE)) == len(named)
    assert len(named) == 7
