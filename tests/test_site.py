"""The documentation site: it builds without a warning, no link inside is dead, and no request leaves it."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
import threading
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from browser import CHROMIUM, Browser
from commands import user_environment, warm_environment
from documents import PAGES, ROOT

DOCS = ROOT / "docs"
MODULES = ("", ".mpu", ".trainer", ".models", ".convert", ".generation", ".ops", ".data")
# Attributes whose address a browser requests by itself.
REQUESTED = {
    ("script", "src"),
    ("img", "src"),
    ("link", "href"),
    ("source", "src"),
    ("iframe", "src"),
    ("use", "href"),
}


def navigation(entry) -> list[str]:
    """The pages of a part of `nav`, in order."""
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [page for part in parts for page in navigation(part)]


def settings() -> dict:
    """mkdocs.yml, which names no Python objects."""
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def test_every_page_is_in_the_navigation_once():
    pages = navigation(settings()["nav"])
    assert len(pages) == len(set(pages))
    assert {page for page in pages if (DOCS / page).exists()} == {
        page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")
    }


def test_the_site_loads_nothing_from_others():
    assert settings()["theme"]["font"] is False
    assert not {"repo_url", "extra_javascript", "analytics"} & settings().keys()
    assert all((DOCS / path).is_file() for path in settings()["extra_css"])


@pytest.mark.parametrize("page", [*PAGES, "tests/README.md", "CHANGELOG.md"])
def test_a_list_or_table_begins_after_an_empty_line(page):
    """The forge forgives this; the site would show the lines as one paragraph."""
    lines = re.sub(
        r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE
    ).splitlines()
    for before, line in pairwise(lines):
        for mark in ("- ", "|", "1. "):
            inside = before.startswith((mark, "  ", "#", "2. ")) or not before.strip()
            assert inside or not line.startswith(mark), f"{page}: put an empty line before {line!r}"


def test_the_drawings_are_up_to_date(tmp_path):
    words = ["python", str(DOCS / "scripts/drawings.py"), str(tmp_path / "pictures")]
    done = subprocess.run(
        words, env=warm_environment(), capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    for drawn in (tmp_path / "pictures").iterdir():
        stored = DOCS / "pictures" / drawn.name
        assert drawn.read_text() == stored.read_text(), "run: python docs/scripts/drawings.py"
    assert {path.name for path in (DOCS / "pictures").glob("*.svg")} == {
        path.name for path in (tmp_path / "pictures").iterdir()
    }


def test_the_table_of_recipes_is_up_to_date(monkeypatch):
    monkeypatch.syspath_prepend(DOCS / "scripts")
    recipes = importlib.import_module("recipes")
    assert recipes.page() == recipes.PAGE.read_text(), "run: python docs/scripts/recipes.py"


class Page(HTMLParser):
    """What a page refers to and what can be referred to in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.requests: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name == "id":
                self.ids.add(value)
            elif name in ("href", "src") and value:
                asks = (tag, name) in REQUESTED and ("rel", "canonical") not in attrs
                (self.requests if asks else self.links).append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    words = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(folder),
    ]
    done = subprocess.run(
        words,
        cwd=ROOT,
        env=user_environment(NO_MKDOCS_2_WARNING="1"),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stdout.strip() + done.stderr.strip()
    return folder


@pytest.fixture(scope="module")
def html(site) -> dict[Path, Page]:
    return {path: Page(path.read_text()) for path in site.rglob("*.html")}


@pytest.mark.before_release
def test_no_link_of_the_site_is_dead(site, html):
    dead = []
    for path, page in html.items():
        for link in [*page.links, *page.requests]:
            parts = urlsplit(link)
            if (
                parts.scheme or parts.netloc or path.name == "404.html"
            ):  # that one is served at any address
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            missing = not target.exists() or (
                parts.fragment
                and target in html
                and unquote(parts.fragment) not in html[target].ids | {"__top"}
            )
            if missing:
                dead.append(f"{path.relative_to(site)}: {link}")
    assert not dead


@pytest.mark.before_release
def test_a_browser_asks_nobody_else(site, html):
    asked = {
        request for page in html.values() for request in page.requests if urlsplit(request).netloc
    }
    assert not asked
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert not re.findall(r"(?:@import|url\()\s*['\"]?(?:https?:)?//", styles)
    assert "fonts.g" not in "".join(path.read_text() for path in html)


@pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on PATH (Debian: apt-get install chromium)"
)
def test_the_search_and_the_drawings_work_in_a_browser(site, tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/"
    with Browser(tmp_path / "profile") as page:
        page.open(f"{address}concepts.html")
        page.wait(
            "[...document.images].length == 3 && [...document.images].every(image => image.naturalWidth == 1000)"
        )
        page.evaluate("document.querySelector('.md-search__input').focus()")
        page.call("Input.insertText", text="resharding")
        page.wait("document.querySelectorAll('.md-search-result__item').length > 0")
        assert not page.problems
        assert not [
            request
            for request in page.requests
            if not request.startswith((address, "data:", "blob:"))
        ]
    server.shutdown()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format, *args):
        pass


def is_code(value) -> bool:
    return inspect.isclass(value) or inspect.isroutine(value)


@pytest.mark.before_release
def test_the_reference_has_every_public_name(site, html):
    for suffix in MODULES:
        module = importlib.import_module(f"shardzoo{suffix}")
        ids = html[site / "api" / f"{suffix.removeprefix('.') or 'shardzoo'}.html"].ids
        documented = [name for name in module.__all__ if is_code(getattr(module, name))]
        missing = [name for name in documented if not any(id.endswith(f".{name}") for id in ids)]
        assert not missing, module
