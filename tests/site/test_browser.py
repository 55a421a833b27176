"""The notebooks as a reader meets them: in JupyterLab, in a real browser, by keyboard.

Lesson 00 is run as a whole. The widgets of later lessons stand in one small notebook, made of the
lessons' own cells and functions; what took the lesson's ranks long to measure is given instead.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import random
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import nbformat
import pytest

from ddpz_lite.course.authoring import rules
from ddpz_lite.course.cli import machine

ROOT = Path(__file__).resolve().parents[2]
LESSON, EXERCISE = "lessons/00_start_here.ipynb", "exercises/03_data_parallel.ipynb"
WIDGETS = "lessons/widgets.ipynb"
BROWSER = machine.browser()
FLAGS = [
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    *(["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []),
]
START = 400  # seconds for JupyterLab, and for the page, to come up
LESSON_RUN = 600  # seconds for all cells; a lesson takes 60 when nothing else runs
STDERR = '[data-mime-type="application/vnd.jupyter.stderr"]'  # how JupyterLab shows errors, too
REACTION = 240_000  # milliseconds for a widget to answer through the kernel
# jupyter_server 2.21 registers a kernel before it sets `last_activity`. If JupyterLab asks for the
# list of kernels in between, the server answers 500 and the console has an error that is not ours.
# With a default for the trait the list is right at any moment.
SERVER_CONFIG = """
from jupyter_server.services.kernels.kernelmanager import ServerKernelManager

ServerKernelManager.last_activity.default_args = (1970, 1, 1)
"""

pytestmark = [
    pytest.mark.rest,
    pytest.mark.timeout(2 * START + LESSON_RUN + 60),
    pytest.mark.skipif(
        BROWSER is None, reason="no Chromium on this machine (on Debian: apt install chromium)"
    ),
]


# The widgets of the notebook WIDGETS, in its order: what Tab reaches in each, by name.
KNOBS = {
    "network explorer": ["Bucket", "Bytes of all gradients / bandwidth", "Latency", "Ranks"],
    "memory calculator": [
        *("Model", "World size", "Stage", "Precision"),
        *("Optimizer", "Micro-batch", "Checkpointing", "Device"),
    ],
    "life of a unit": ["Moment", "Overlap", "After forward", "Ranks"],
}
RING = ["World size", "Next step", "Step back", "To the start"]
PLACES = {name: place for place, name in enumerate(["ring", *KNOBS, "quiz"])}


def code_of(number: str) -> list[str]:
    """The code cells of a lesson."""
    (path,) = (ROOT / "lessons").glob(f"{number}_*.ipynb")
    return [cell.source for cell in rules.read(path).cells if cell.cell_type == "code"]


def cell(number: str, having: str) -> str:
    """The code cell of a lesson that contains `having`."""
    (found,) = (source for source in code_of(number) if having in source)
    return found


def functions(number: str, *names: str) -> str:
    """Functions of a lesson, by name, without the rest of their cells."""
    found = {}
    for source in code_of(number):
        for node in ast.parse(without_magics(source)).body:
            if isinstance(node, ast.FunctionDef):
                found[node.name] = ast.unparse(node)
    return "\n\n".join(found[name] for name in names)


def without_magics(source: str) -> str:
    return "\n".join(line for line in source.splitlines() if not line.startswith(("!", "%")))


def widget_cells() -> list[str]:
    """The code of the notebook WIDGETS. Numbers stand in for what lessons 05 and 11 measure."""
    imports = ["torch", "torch.distributed as dist", "ddpz_lite as dz"]
    return [
        "\n".join(f"import {name}" for name in imports) + "\nfrom ddpz_lite import show",
        functions("02", "exchange", "add_step", "copy_step"),
        cell("02", "show.ring_steps("),
        "from ddpz_lite.course.built.lesson05 import groups_of\n"
        "from ddpz_lite.course.show.lesson05 import bucket_sizes\n\n"
        + functions("05b", "simulate"),
        "BACKWARD, sizes_sent = 0.1, [300_000] * 8\n"
        "GRADIENT_BYTES = sum(sizes_sent)\n"
        "your_ready, compute = [0.06 + 0.01 * place for place in range(8)], 0.15\n"
        'yours = {"forward": 0.05}',
        cell("05b", "show.explore(\n    draw_step"),
        "from ddpz_lite.course.show.calculator import calculator\ncalculator()",
        "from ddpz_lite.course.show import unit_life\n\nROOT, BLOCK, BLOCKS = 40_000, 160_000, 4",
        cell("11b", "show.explore(\n    draw_life"),
        cell("02", "show.quiz("),
    ]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """The address of a JupyterLab that serves copies of the notebooks: `{}` is for which."""
    home = tmp_path_factory.mktemp("lab")
    for folder in ("lessons", "exercises"):
        shutil.copytree(ROOT / folder, home / folder)
    make_notebook(home / WIDGETS, widget_cells())
    runtime = tempfile.TemporaryDirectory(prefix="ddpz-lab-")  # short: it holds kernels' sockets
    environment = isolated(home) | {"JUPYTER_RUNTIME_DIR": runtime.name}
    port, token = free_port(), secrets.token_hex(16)
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ServerApp.port_retries=0"]
    command += [f"--port={port}", f"--ServerApp.root_dir={home}", "--KernelManager.transport=ipc"]
    command += ["--allow-root"] if "--no-sandbox" in FLAGS else []
    log = (home / "lab.log").open("w")
    server = subprocess.Popen(
        command, env={**environment, "JUPYTER_TOKEN": token}, stdout=log, stderr=log
    )
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for_server(f"{address}/api/status?token={token}", server, home / "lab.log")
        yield f"{address}/lab/tree/{{}}?token={token}&reset"
    finally:
        server.terminate()  # it shuts its kernels down before it ends
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        log.close()
        runtime.cleanup()


def isolated(home: Path) -> dict[str, str]:
    """An environment in which JupyterLab finds only the test's settings."""
    folders = {
        "JUPYTER_CONFIG_DIR": home / "config",
        "JUPYTER_DATA_DIR": home / "data",
        "JUPYTERLAB_SETTINGS_DIR": home / "settings",
        "JUPYTERLAB_WORKSPACES_DIR": home / "workspaces",
        "IPYTHONDIR": home / "ipython",
    }
    settings = {
        "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
        # All cells are in the page, not just those on the screen, so that a test can find them.
        "notebook-extension/tracker": {"windowingMode": "none"},
    }
    (home / "config").mkdir()
    (home / "config/jupyter_server_config.py").write_text(SERVER_CONFIG)
    for name, values in settings.items():
        path = home / "settings/@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    scripts = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    more = {"JUPYTER_PREFER_ENV_PATH": "1", "PYTHONPATH": paths, "PATH": scripts}
    return {**os.environ, **{name: str(path) for name, path in folders.items()}, **more}


def make_notebook(path: Path, sources: list[str]) -> None:
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    kernel = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)


def free_port() -> int:
    """A free port below those that the system hands out, so that no test next to us is given it."""
    while True:
        port = random.randrange(20_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def wait_for_server(address: str, server: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + START
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(address, timeout=2).close()
            return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(0.2)
    pytest.fail(f"JupyterLab did not come up in {START} s:\n{log.read_text()[-2000:]}")


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=FLAGS)
        yield browser
        browser.close()


def opened(browser, lab: str, notebook: str):
    """A notebook in its own page. `page.complaints` is what the console said."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.complaints = []
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on("console", lambda line: note(page, line))
    page.goto(lab.format(notebook), timeout=START * 1000)
    page.locator(".jp-Notebook .jp-CodeCell").first.wait_for(timeout=START * 1000)
    page.get_by_text("| Idle").wait_for(timeout=START * 1000)
    return page


@pytest.fixture(scope="module")
def page(browser, lab):
    """Lesson 00, run from top to bottom."""
    page = opened(browser, lab, LESSON)
    run_all(page)
    yield page
    page.close()


@pytest.fixture(scope="module")
def widgets(browser, lab):
    """The notebook of widgets, run from top to bottom."""
    page = opened(browser, lab, WIDGETS)
    run_all(page)
    yield page
    page.close()


def note(page, line) -> None:
    if line.type == "error":
        page.complaints.append(f"{line.text} ({line.location['url']})")


def press_run_all(page) -> None:
    """The menu's own command."""
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()


def run_all(page) -> None:
    """Run all cells, and wait until every cell has a number.

    A cell that measures what was not predicted asks for a number first: it gets one.
    """
    press_run_all(page)
    deadline = time.monotonic() + LESSON_RUN
    prompts = page.locator(".jp-Notebook .jp-CodeCell .jp-InputPrompt")
    while not all_ran(shown := prompts.all_inner_texts()):
        if errors := page.locator(STDERR).all_inner_texts():
            pytest.fail(f"a cell failed:\n{errors[0]}")
        if time.monotonic() > deadline:
            pytest.fail(f"after {LESSON_RUN} s the cells' numbers are {shown}")
        if (asked := page.locator(".jp-Stdin-input")).count():
            asked.first.fill("1")
            asked.first.press("Enter")
        time.sleep(0.5)
    page.get_by_text("| Idle").wait_for(timeout=REACTION)


def all_ran(prompts: list[str]) -> bool:
    """Whether the prompts are [1]:, [2]: ... A cell whose source is hidden has an empty one."""
    wanted = [f"[{number}]:" for number in range(1, len(prompts) + 1)]
    return all(shown in ("", number) for shown, number in zip(prompts, wanted, strict=True))


def live(page, *, having: str):
    """The first widget on the page that contains `having`, a CSS selector."""
    found = page.locator(".dz-live").filter(has=page.locator(having)).first
    found.wait_for(timeout=REACTION)
    found.scroll_into_view_if_needed()
    return found


def until(read, changed, what: str):
    """Call `read` until `changed` accepts what it returns; return that."""
    deadline = time.monotonic() + REACTION / 1000
    while not changed(value := read()):
        if time.monotonic() > deadline:
            pytest.fail(f"{what} within {REACTION / 1000:.0f} s; it is {value!r}"[:500])
        time.sleep(0.1)
    return value


def test_every_cell_ran_without_an_error(page):
    assert page.locator(".jp-Notebook .jp-CodeCell").count() > 5
    assert page.locator(STDERR).all_inner_texts() == []


def test_a_quiz_explains_wrong_answers_and_the_right_one(page):
    quiz = live(page, having=".dz-choice")
    question = quiz.locator(".widget-vbox").filter(has=page.locator(".dz-choice")).first
    choices, shown = question.locator(".dz-choice"), question.get_by_role("alert")
    score = quiz.get_by_role("status")
    assert shown.count() == 0 and score.inner_text().startswith("0 of ")

    def answer(choice: int) -> str:
        """Choose by keyboard; the explanation that comes."""
        before = shown.inner_text() if shown.count() else ""
        choices.nth(choice).focus()
        page.keyboard.press("Enter")
        return until(
            lambda: shown.inner_text() if shown.count() else "",
            lambda now: now not in ("", before),
            f"no new explanation after answer {choice}",
        )

    verdicts = [answer(choice) for choice in range(choices.count())]
    rights = [i for i, text in enumerate(verdicts) if "Right." in text]
    wrongs = [i for i, text in enumerate(verdicts) if "Not right." in text]
    assert len(rights) == 1 and len(wrongs) == len(verdicts) - 1 >= 1
    if rights[0] != len(verdicts) - 1:  # leave the right answer, to come back to it
        answer(rights[0])
    assert answer(wrongs[0]) == verdicts[wrongs[0]]
    until(score.inner_text, lambda text: text.startswith("1 of ") and "0 right" in text, "score")
    assert answer(rights[0]) == verdicts[rights[0]]
    until(score.inner_text, lambda text: text.startswith("1 of ") and "1 right" in text, "score")


# ---- the widgets of later lessons ----


def widget(page, name: str):
    """A widget of the notebook WIDGETS."""
    found = page.locator(".dz-live").nth(PLACES[name])
    found.wait_for(timeout=REACTION)
    found.scroll_into_view_if_needed()
    return found


NAME_OF_THE_FOCUSED = """() => {
    const it = document.activeElement;
    if (!it.closest('.dz-live') || it.tagName === 'SUMMARY') return null;
    return it.ariaLabel ?? it.labels?.[0]?.innerText ?? it.innerText;
}"""


def names_that_tab_reaches(page, first) -> list[str]:
    """The names of the controls from the first one on, until Tab leaves them."""
    first.focus()
    names = []
    while (name := page.evaluate(NAME_OF_THE_FOCUSED)) is not None:
        names.append(name.strip())
        assert len(names) < 30, f"Tab goes round in {names}"
        page.keyboard.press("Tab")
    return names


def pictured(widget) -> tuple[str | None, str | None]:
    """The picture that is shown, and its text."""
    figure = widget.locator("figure img").first
    return figure.get_attribute("src"), figure.get_attribute("alt")


@pytest.mark.parametrize("name", KNOBS)
def test_every_slider_is_named_and_moves_by_keyboard(widgets, name):
    explorer = widget(widgets, name)
    sliders = [explorer.locator("select, [role=slider]").nth(i) for i in range(len(KNOBS[name]))]
    roles = [
        "combobox" if k.evaluate("it => it.tagName") == "SELECT" else "slider" for k in sliders
    ]
    wanted = []
    for label, role in zip(KNOBS[name], roles, strict=True):
        wanted += [label, f"{label} (number)"] if role == "slider" else [label]
    assert names_that_tab_reaches(widgets, sliders[0]) == wanted
    for slider, role, label in zip(sliders, roles, KNOBS[name], strict=True):
        assert explorer.get_by_role(role, name=label).count() == 1, "no name for a screen reader"
        turn(explorer, slider, label, arrow(slider, role))


def turn(explorer, slider, label: str, key: str) -> None:
    """Press a key on a knob; wait until the picture is another one and the line under it, too."""
    before, shown = pictured(explorer), explorer.get_by_role("status").inner_text()
    slider.press(key)
    until(
        lambda: (pictured(explorer)[0], explorer.get_by_role("status").inner_text()),
        lambda now: now[0] != before[0] and now[1] != shown,
        f"the picture and the line under it stayed as they were when {label!r} was turned",
    )
    assert pictured(explorer)[1].strip()


def arrow(slider, role: str) -> str:
    """The arrow key that has somewhere to go."""
    if role == "combobox":
        at_the_end = slider.evaluate("it => it.selectedIndex === it.length - 1")
        return "ArrowUp" if at_the_end else "ArrowDown"
    at_the_end = slider.get_attribute("aria-valuenow") == slider.get_attribute("aria-valuemax")
    return "ArrowLeft" if at_the_end else "ArrowRight"


def test_the_ring_goes_step_by_step_by_keyboard(widgets):
    ring = widget(widgets, "ring")
    worlds = ring.get_by_role("combobox", name="World size")
    assert names_that_tab_reaches(widgets, worlds) == RING

    def press(key: str, *, on, says: str) -> None:
        """Press a key on a control; wait until the picture is another one and the text says so."""
        before = pictured(ring)[0]
        on.focus()
        widgets.keyboard.press(key)
        until(
            lambda: (*pictured(ring), ring.get_by_role("status").inner_text()),
            lambda now: now[0] != before and now[1].startswith(says) and now[2].startswith(says),
            f"the ring does not say {says!r}",
        )

    forward, back, start = (ring.get_by_role("button", name=name) for name in RING[1:])
    press("Enter", on=forward, says="First half, step 0")
    press("Enter", on=forward, says="First half, step 1")
    press("Enter", on=back, says="First half, step 0")
    press("Enter", on=start, says="Before the first of 6 steps")
    press("ArrowUp", on=worlds, says="Before the first of 4 steps")


def test_tab_reaches_the_answers_of_a_quiz_and_enter_gives_one(widgets):
    quiz = widget(widgets, "quiz")
    answers = quiz.locator(".dz-choice")
    names = names_that_tab_reaches(widgets, answers.first)
    assert names == [text.strip() for text in answers.all_inner_texts()]
    assert len(names) == 9 and [name[:2] for name in names] == ["a)", "b)", "c)"] * 3
    answers.nth(1).focus()
    widgets.keyboard.press("Enter")
    until(quiz.get_by_role("alert").all_inner_texts, lambda shown: len(shown) == 1, "explanations")
    until(answers.nth(1).inner_text, lambda text: text[0] in "✓✗", "the answer's own mark")


def test_a_live_widget_hides_its_static_version(widgets):
    stills = widgets.locator(".dz-still")
    assert stills.count() == len(PLACES) == widgets.locator(".dz-live").count()
    assert not any(still.is_visible() for still in stills.all())


# ---- an unsolved exercise ----


def test_a_check_of_an_empty_answer_says_where_to_begin(browser, lab):
    page = opened(browser, lab, EXERCISE)
    press_run_all(page)
    first = page.locator(STDERR).first
    first.wait_for(timeout=START * 1000)
    assert first.inner_text().strip() == (
        "NotAttempted: 03.same_start is not solved yet: 4 points, about 5 minutes. "
        'Where to begin: check.hint("03.same_start")'
    )
    assert page.locator(STDERR).count() == 1
    assert page.complaints == []
    page.close()


@pytest.mark.parametrize("notebook", ["page", "widgets"])
def test_the_console_stayed_silent(request, notebook):
    assert request.getfixturevalue(notebook).complaints == []


SCROLLING = """
    nodes => nodes.flatMap(root => [root, ...root.querySelectorAll('*')]).filter(node => {
        const style = getComputedStyle(node);
        const bars = way => ['auto', 'scroll'].includes(style[way]);
        return node.offsetParent !== null && node.clientHeight > 0 &&
            (bars('overflowX') && node.scrollWidth > node.clientWidth ||
             bars('overflowY') && node.scrollHeight > node.clientHeight);
    }).map(node => `${node.className} ${node.scrollWidth}>${node.clientWidth}`
        + ` ${node.scrollHeight}>${node.clientHeight}`)
"""


def test_no_scroll_bar_stands_in_or_under_a_widget(widgets):
    found = widgets.locator(".dz-live").evaluate_all(SCROLLING)
    assert found == []
