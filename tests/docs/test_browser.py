"""The built pages in a browser, where Playwright is: none is wider than a phone or a desktop, all links answer."""

import functools
import http.server
import shutil
import subprocess
import sys
import threading
import urllib.parse
import urllib.request

import pytest

from tests.docs import pages

pytest.importorskip("sphinx", reason="needs Sphinx: the extra docs")
playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")
pytestmark = pytest.mark.exhaustive
WIDTHS = {"phone": 390, "desktop": 1440}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the pages and serve them from this machine; return the address and the folder."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "--fail-on-warning", "docs", str(folder)]
    subprocess.run(command, cwd=pages.ROOT, check=True)
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", folder
        server.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format, *args):
        """Print nothing."""


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        executable = shutil.which("chromium") or shutil.which("google-chrome")
        try:
            opened = started.chromium.launch(executable_path=executable)
        except playwright.Error as error:
            pytest.skip(f"needs Chromium: {error.message.partition('!')[0]}")
        yield opened
        opened.close()


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_pages_fit_and_links_answer(site, browser, width):
    address, folder = site
    page, problems, links = browser.new_page(viewport={"width": width, "height": 900}), [], set()
    page.route("https://**/*", lambda route: route.fulfill(body=""))  # MathJax stays out: equations are then as written
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    for path in sorted(folder.rglob("*.html")):
        name = path.relative_to(folder).as_posix()
        page.goto(address + name, timeout=120_000)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        assert page.evaluate("[...document.images].every(image => image.naturalWidth > 0)"), name
        assert page.evaluate("[...document.querySelectorAll('p > img')].every(image => image.width > 600)"), name
        links |= {(name, link) for link in page.evaluate("[...document.links].map(link => link.href)")}
    page.close()
    assert problems == []
    answered = functools.cache(lambda url: urllib.request.urlopen(url).read().decode())
    for name, link in links:
        url, _, anchor = link.partition("#")
        if url.startswith(address):
            assert not anchor or f'id="{urllib.parse.unquote(anchor)}"' in answered(url), (name, link)
    assert len(links) > 500
