"""The site of the course: every page is there, every link and anchor leads somewhere, and a reader
without a network misses nothing.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import ddpz_lite as dz
from ddpz_lite.cli import machine

ROOT = Path(__file__).resolve().parents[2]
BOOK = ROOT / "book"
NOTEBOOKS = sorted([*ROOT.glob("lessons/*.ipynb"), *ROOT.glob("exercises/*.ipynb")])


# ---- the page about the library ----


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"book_{name}", BOOK / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_about_the_library_has_every_public_name():
    page = (BOOK / "api.rst").read_text()
    named = re.findall(r"^\.\. [\w:]+:: ddpz_lite\.(\w+)", page, re.M)
    assert sorted(named) == sorted(dz.__all__)


def test_a_docstring_keeps_its_structure():
    docstring = """Run `f(*args)` on rank_0.

    with x:
        pass

timeout   seconds, and
          no more
backend   "gloo"

Args:
    module: on the device.
    a, b: two, which
        go on

Raises: ValueError if `|x|` is 2*Ψ."""
    assert load("docstrings").as_rst(docstring.splitlines()) == [
        *("Run ``f(*args)``\\  on rank\\_0.", ""),
        *("::", "", "    with x:", "        pass", ""),
        *("", "``timeout``", "    seconds, and", "    no more"),
        *("", "``backend``", '    "gloo"', ""),
        *("**Args:**", ""),
        *("", "``module``", "    on the device."),
        *("", "``a, b``", "    two, which", "    go on", ""),
        *("Raises: ValueError if ``|x|``\\  is 2\\*Ψ.", ""),
    ]


def test_a_docstring_that_is_no_list_of_names_is_refused():
    with pytest.raises(ValueError, match="a name and its meaning, got 'world size'"):
        load("docstrings").as_rst(["Args:", "    world size"])


# ---- the site ----


class Page(HTMLParser):
    """What a page of the site holds: anchors, links, what a browser fetches for it, pictures."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.title = path, ""
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.alts: list[str | None] = []
        self._in_title = False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        said = dict(attrs)
        self._in_title |= tag == "h1"
        self.ids |= {said[name] for name in ("id", "name") if said.get(name)}
        if tag == "a" and "href" in said:
            self.links.append(said["href"])
        elif tag == "link" and said.get("rel") not in ("search", "next", "prev", "index"):
            self.fetched.append(said["href"])
        elif "src" in said:
            self.fetched.append(said["src"])
        if tag == "img":
            self.alts.append(said.get("alt"))

    def handle_endtag(self, tag):
        self._in_title &= tag != "h1"

    def handle_data(self, data):
        self.title += data if self._in_title else ""


OFFLINE = """
import runpy, socket, sys
def refuse(*args, **kwargs):
    raise RuntimeError("the network was asked for")
socket.getaddrinfo = socket.socket.connect = refuse
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def build(folder: Path, to: Path) -> subprocess.CompletedProcess[str]:
    """Build the book that lies in `folder`, without a network."""
    command = [sys.executable, "-c", OFFLINE, folder / "build.py", "--to", to]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, env=env, cwd=to, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The pages of the site by their path in it. There is no network while it is built."""
    to = tmp_path_factory.mktemp("book")
    done = build(BOOK, to)
    assert done.returncode == 0, done.stdout
    html = to / "html"
    pages = {path.relative_to(html).as_posix(): Page(path) for path in html.rglob("*.html")}
    yield pages
    shutil.rmtree(to)


def stored_pictures(notebook: Path) -> int:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    shown = (output.get("data", {}) for cell in cells for output in cell.get("outputs", []))
    return sum("".join(data.get("text/html", [])).count("<img") for data in shown)


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_notebook_is_a_page_with_its_number_and_its_pictures(site, notebook):
    page = site[f"{notebook.parent.name}/{notebook.stem}.html"]
    title = "".join(json.loads(notebook.read_text(encoding="utf-8"))["cells"][0]["source"])
    number = notebook.name.partition("_")[0]
    assert page.title.startswith(f"{number} {title.splitlines()[0].removeprefix('# ')}")
    assert len(
        [link for link in page.fetched if link.startswith("data:image/")]
    ) == stored_pictures(notebook)


@pytest.mark.slow
def test_every_link_and_anchor_leads_somewhere(site):
    broken, followed = [], 0
    for name, page in site.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or link == "#":
                continue
            target = page.path.parent / unquote(parts.path) if parts.path else page.path
            there = os.path.relpath(target, site["index.html"].path.parent)
            followed += 1
            if not target.is_file():
                broken.append(f"{name}: {link}: no such file")
            elif parts.fragment and unquote(parts.fragment) not in site[there].ids:
                broken.append(f"{name}: {link}: no such place")
    assert broken == []
    assert followed > 1000


@pytest.mark.slow
def test_nothing_that_a_page_needs_is_elsewhere(site):
    missing = []
    for name, page in site.items():
        for link in page.fetched:
            parts = urlsplit(link)
            if parts.scheme == "data":
                continue
            if (
                parts.scheme
                or parts.netloc
                or not (page.path.parent / unquote(parts.path)).exists()
            ):
                missing.append(f"{name}: {link}")
    assert missing == []
    for style in site["index.html"].path.parent.rglob("*.css"):
        assert not re.search(r"@import|url\([\"']?(?:https?:)?//", style.read_text()), style.name


@pytest.mark.slow
def test_every_picture_has_a_text(site):
    pictures = [(name, alt) for name, page in site.items() for alt in page.alts]
    assert len(pictures) > 50
    assert [(name, alt) for name, alt in pictures if not alt or len(alt.strip()) < 15] == []


@pytest.mark.slow
def test_every_public_name_has_its_place_and_its_source(site):
    assert {
        f"ddpz_lite.{name}" for name in dz.__all__ if name not in ("data", "meter", "show")
    } <= (site["api.html"].ids)
    assert "_modules/ddpz_lite/strategies/zero3.html#ZeRO3" in site["api.html"].links


@pytest.mark.slow
@pytest.mark.skipif(machine.browser() is None, reason="no Chromium on this machine")
def test_a_browser_asks_nobody_else_and_has_no_complaint(site):
    from playwright.sync_api import sync_playwright

    asked, complaints = [], []
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=machine.browser(), args=flags)
        page = browser.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda line: line.type == "error" and complaints.append(line.text))
        for name in ("index.html", "api.html", "lessons/README.html", "lessons/00_start_here.html"):
            page.goto(site[name].path.as_uri())
        answers = page.locator("details:has-text('Right.')").first
        assert not answers.get_by_text("Right.").first.is_visible()
        answers.locator("summary").press("Enter")
        assert answers.get_by_text("Right.").first.is_visible()
        browser.close()
    assert [url for url in asked if urlsplit(url).scheme not in ("file", "data")] == []
    assert complaints == []


@pytest.mark.slow
def test_a_broken_link_or_a_wrong_file_stops_the_build(tmp_path):
    book = shutil.copytree(BOOK, tmp_path / "book", ignore=shutil.ignore_patterns("__pycache__"))
    (book / "api.rst").write_text("The library\n===========\n")
    for name in ("lessons/README", "lessons/GLOSSARY", "exercises/README"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.md").write_text("# A page\n")
    cell = {
        "cell_type": "markdown",
        "metadata": {},
        "source": ["# Start\n", "\n", "[x](01_x.ipynb)"],
    }
    notebook = {"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 4}
    for name in ("lessons/00_start_here", "exercises/00_start"):
        (tmp_path / f"{name}.ipynb").write_text(json.dumps(notebook))
    done = build(book, tmp_path)
    assert done.returncode != 0 and "01_x.ipynb" in done.stdout
    assert "toctree" not in done.stdout  # everything else was in order

    cell["source"] = ["No title"]
    (tmp_path / "lessons/00_start_here.ipynb").write_text(json.dumps(notebook))
    done = build(book, tmp_path)
    assert done.returncode != 0 and "notebook 00 should begin with its title" in done.stdout
