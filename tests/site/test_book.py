"""The site of the course: every page is there, every link and anchor leads somewhere, and a reader
without a network misses nothing.
"""

from __future__ import annotations

import html
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
from ddpz_lite.course.cli import machine
from ddpz_lite.course.show import calculator, ring

ROOT = Path(__file__).resolve().parents[2]
BOOK = ROOT / "book"
NOTEBOOKS = sorted([*ROOT.glob("lessons/*.ipynb"), *ROOT.glob("exercises/*.ipynb")])


# ---- the page about the library ----


@pytest.fixture(autouse=True)
def beside(monkeypatch):
    """build.py finds states.py next to it, as when it is run."""
    monkeypatch.syspath_prepend(BOOK)


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"book_{name}", BOOK / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_about_the_library_has_every_public_name():
    page = (BOOK / "api.rst").read_text()
    named = re.findall(r"^\.\. [\w:]+:: ddpz_lite\.(?:course\.)?(\w+)", page, re.M)
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


def test_a_docstring_that_is_not_a_list_of_names_is_refused():
    with pytest.raises(ValueError, match="a name and its meaning, got 'world size'"):
        load("docstrings").as_rst(["Args:", "    world size"])


# ---- widgets without a kernel ----


def still(lesson: str, tells: str) -> str:
    """The HTML that is stored in a lesson's cell."""
    (path,) = ROOT.glob(f"lessons/{lesson}_*.ipynb")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    (cell,) = (cell for cell in cells if tells in "\n" + "".join(cell["source"]))
    return "".join("".join(o.get("data", {}).get("text/html", "")) for o in cell["outputs"])


def test_the_states_of_the_ring_are_those_of_a_right_ring():
    states = load("states")
    for world in states.WORLDS:
        model = ring.RingSteps({world: states._ring(world)})
        for step in range(1, model.last + 1):
            model.go(1)
            how = "added" if step < world else "copied"
            assert [move.how for move in model.moves()] == [how] * world
        assert model.finished == world**2
    found = states.ring_steps()
    assert [len(steps) for steps in found["states"]] == [3, 5, 7]
    assert "Second half, step 2: each rank receives one chunk" in found["states"][2][6]


def test_no_position_of_a_slider_is_dead_and_the_sizes_are_those_of_the_lesson():
    states = load("states")
    stored = still("11b", "unit_life.picture(")
    found = states.lives(stored)
    for moments in (moments for by_keep in found["states"] for moments in by_keep):
        assert len(set(moments)) == len(moments) > 10
        assert f"Moment {len(moments) - 1} of {len(moments) - 1}:" in moments[-1]
    found_text = re.search(r"One of 4 ranks holds ([\d.]+ MB)", stored)[1]
    assert f"One rank holds {found_text}" in found["states"][1][0][13], "as the still picture says"


def test_the_states_of_the_calculator_say_what_it_says():
    states = load("states")
    states.CALCULATED = {**states.CALCULATED, "Model": ["6.7 B"], "World size": [8]}
    found = states.calculate()
    job = calculator.Job(calculator.MODELS["6.7 B"], 8, 3, windows=4)
    assert calculator.advice(job, 80e9) in html.unescape(found["states"][0][0][3][0][1])
    assert [len(control["values"]) for control in found["sliders"]] == [1, 1, 4, 2, 3]


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
        found_text = dict(attrs)
        self._in_title |= tag == "h1"
        self.ids |= {found_text[name] for name in ("id", "name") if found_text.get(name)}
        if tag == "a" and "href" in found_text:
            self.links.append(found_text["href"])
        elif tag == "link" and found_text.get("rel") not in ("search", "next", "prev", "index"):
            self.fetched.append(found_text["href"])
        elif "src" in found_text:
            self.fetched.append(found_text["src"])
        if tag == "img":
            self.alts.append(found_text.get("alt"))

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
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    return subprocess.run(
        command, env=env, cwd=to, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


pytestmark = [pytest.mark.rest, pytest.mark.timeout(1800)]  # the site takes 40 s of processor time


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The pages of the site by their path in it. There is no network while it is built."""
    to = tmp_path_factory.mktemp("book")
    done = build(BOOK, to)
    assert done.returncode == 0, done.stdout
    built = to / "html"
    pages = {path.relative_to(built).as_posix(): Page(path) for path in built.rglob("*.html")}
    yield pages
    shutil.rmtree(to)


def stored_pictures(notebook: Path) -> int:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    shown = (output.get("data", {}) for cell in cells for output in cell.get("outputs", []))
    return sum("".join(data.get("text/html", [])).count("<img") for data in shown)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_notebook_is_a_page_with_its_number_and_its_pictures(site, notebook):
    page = site[f"{notebook.parent.name}/{notebook.stem}.html"]
    title = "".join(json.loads(notebook.read_text(encoding="utf-8"))["cells"][0]["source"])
    number = notebook.name.partition("_")[0]
    assert page.title.startswith(f"{number} {title.splitlines()[0].removeprefix('# ')}")
    assert len(
        [link for link in page.fetched if link.startswith("data:image/")]
    ) == stored_pictures(notebook)


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


def test_every_picture_has_a_text(site):
    pictures = [(name, alt) for name, page in site.items() for alt in page.alts]
    assert len(pictures) > 50
    assert [(name, alt) for name, alt in pictures if not alt or len(alt.strip()) < 15] == []


def test_every_public_name_has_its_place_and_its_source(site):
    assert {
        f"ddpz_lite.{name}" for name in dz.__all__ if name not in ("data", "meter", "show")
    } <= (site["api.html"].ids)
    assert "_modules/ddpz_lite/strategies/zero3.html#ZeRO3" in site["api.html"].links


@pytest.mark.skipif(machine.browser() is None, reason="no Chromium on this machine")
def test_a_browser_fetches_nothing_else_and_reports_no_error(site):
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
        for name, turned in turns(page, site):
            assert len(set(turned)) == len(turned) > 5, f"{name}: a position without a state"
        search_leads_to(page, site, "张量并行", "GLOSSARY")
        for words, card in {
            "zero redundancy mean": "zero.html#q14",
            "零冗余": "zero.html#q14",
            "冗余零": "zero.html#q14",  # not in this order: found sign by sign
        }.items():
            search_leads_to(page, site, words, card, "#dz-cards")
            page.locator(f"#dz-cards a[href$='{card}']").click()
            page.wait_for_function(  # it scrolls to the card
                "Math.abs(document.getElementById('q14')?.getBoundingClientRect().top) < 100"
            )
        browser.close()
    assert [url for url in asked if urlsplit(url).scheme not in ("file", "data")] == []
    assert complaints == []


def turns(page, site):
    """What each position of the widgets that can be turned shows, by keyboard."""
    for name in ("02_ranks_and_collectives", "11b_zero3_in_practice"):
        page.goto(site[f"lessons/{name}.html"].path.as_uri())
        widget = page.locator(".dz-states")
        assert not widget.locator("xpath=..").locator("figure").first.is_visible(), "the still one"
        slider, found_text = widget.locator("input"), widget.get_by_role("status")
        slider.press("Home")
        shown = [found_text.inner_text()]
        for _ in range(int(slider.get_attribute("max"))):
            slider.press("ArrowRight")
            shown.append(found_text.inner_text())
        yield name, shown
    page.goto(site["lessons/08_the_memory_wall.html"].path.as_uri())
    widget = page.locator(".dz-states")
    shown = []
    for stage in "0123":
        for device in ("24 GB", "80 GB"):
            widget.get_by_role("combobox", name="Stage").select_option(stage)
            widget.get_by_role("combobox", name="Device").select_option(device)
            shown.append(widget.get_by_role("status").inner_text())
    yield "calculator", shown


def search_leads_to(page, site, words: str, name: str, results: str = "#search-results") -> None:
    """Search the site for `words`, from a file, without a server, until the page `name` is found.

    The list of results grows while one looks at it.
    """
    page.goto(f"{site['search.html'].path.as_uri()}?q={words}")
    page.locator(f"{results} li a[href*='{name}']").first.wait_for(timeout=240_000)


def test_a_screen_reader_gets_names_levels_and_lists(site):
    """The faults that axe-core found in the pages as Sphinx, its theme and MyST-NB make them."""
    nameless = re.compile(
        r"""role="heading">|<aside class=|Toggle\ hidden|<dl>\n<dd>|<th[^>]*>(?:<p></p>)?</th>""",
        re.X,
    )
    found = {name: nameless.findall(page.path.read_text("utf-8")) for name, page in site.items()}
    assert {name: faults for name, faults in found.items() if faults} == {}
    api, lesson = (site[n].path.read_text("utf-8") for n in ("api.html", "lessons/05_ddp.html"))
    assert api.count('<ul class="dz-parameters">') > 50 and "<li><em" in api
    assert 'aria-label="All pages"' in lesson and "<summary>" in lesson


def test_the_home_shows_what_this_is_and_each_page_leads_on(site):
    home, install = site["index.html"], site["install.html"]
    text = home.path.read_text(encoding="utf-8")
    assert sum("at-work-" in link for link in home.fetched) == 2  # one for light, one for dark
    assert 'href="lessons/05_ddp.html"' in text.split("What you build", 1)[1]
    assert "When a job hangs, a report says why." in text
    assert "A program judges the exercises" in text
    assert 'data-states="calculator"' in text and "favicon.svg" in text
    found_text = re.sub(r"<[^>]+>", "", install.path.read_text(encoding="utf-8"))
    for words in ("make lab", "Select Kernel", "TORCH=cuda", "no module ensurepip"):
        assert words in found_text
    lesson = site["lessons/05_ddp.html"]
    onward = re.findall(r'class="(?:next|prev)-page" href="([^"]+)"', lesson.path.read_text())
    assert set(onward) == {"05b_ddp_in_practice.html", "04b_loaders_and_skew.html"}
    assert "This kernel does not have the course" not in lesson.path.read_text(encoding="utf-8")


def home_of_two_notebooks() -> str:
    """The lists of pages of our home, without the words, which lead to many more."""
    lists = re.findall(r"```{toctree}\n.*?```", (BOOK / "index.md").read_text(), re.S)
    return "# Home\n\n" + "\n\n".join(lists).replace("\ninstall\n", "\n")


def test_a_broken_link_stops_the_build(tmp_path):
    book = shutil.copytree(BOOK, tmp_path / "book", ignore=shutil.ignore_patterns("__pycache__"))
    (book / "api.rst").write_text("The library\n===========\n")
    (book / "index.md").write_text(home_of_two_notebooks())
    (book / "install.md").unlink()
    for name in ("lessons/README", "lessons/GLOSSARY", "exercises/README", "exercises/CLASS"):
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


def test_a_notebook_without_a_title_stops_the_build():
    cell = {"cell_type": "markdown", "metadata": {}, "source": ["No title"]}
    with pytest.raises(ValueError, match="notebook 00 should begin with its title, not 'No title'"):
        load("build").adapt({"cells": [cell]}, "00", {})
