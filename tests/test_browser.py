"""Lesson 00 as a reader meets it: in JupyterLab, in a real browser, with keyboard and mouse."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from ddpz_lite.cli import machine

ROOT = Path(__file__).resolve().parent.parent
LESSON = "00_start_here.ipynb"
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
START = 60  # seconds for JupyterLab, and for the page, to come up
LESSON_RUN = 180  # seconds for all cells; a lesson takes 60 when nothing else runs
STDERR = '[data-mime-type="application/vnd.jupyter.stderr"]'  # how JupyterLab shows errors, too
REACTION = 15_000  # milliseconds for a widget to answer through the kernel

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2 * START + LESSON_RUN + 60),
    pytest.mark.skipif(
        BROWSER is None, reason="no Chromium on this machine (on Debian: apt install chromium)"
    ),
]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """The address of a JupyterLab, token included, that serves a copy of lessons/."""
    home = tmp_path_factory.mktemp("lab")
    shutil.copytree(ROOT / "lessons", home / "lessons")
    environment = isolated(home)
    port, token = free_port(), secrets.token_hex(16)
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ServerApp.port_retries=0"]
    command += [f"--port={port}", f"--ServerApp.root_dir={home / 'lessons'}"]
    command += ["--allow-root"] if "--no-sandbox" in FLAGS else []
    log = (home / "lab.log").open("w")
    server = subprocess.Popen(
        command, env={**environment, "JUPYTER_TOKEN": token}, stdout=log, stderr=log
    )
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for_server(f"{address}/api/status?token={token}", server, home / "lab.log")
        yield f"{address}/lab/tree/{LESSON}?token={token}&reset"
    finally:
        server.terminate()  # it shuts its kernels down before it ends
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        log.close()


def isolated(home: Path) -> dict[str, str]:
    """An environment in which JupyterLab finds nobody's settings but the test's."""
    folders = {
        "JUPYTER_CONFIG_DIR": home / "config",
        "JUPYTER_DATA_DIR": home / "data",
        "JUPYTER_RUNTIME_DIR": home / "runtime",
        "JUPYTERLAB_SETTINGS_DIR": home / "settings",
        "JUPYTERLAB_WORKSPACES_DIR": home / "workspaces",
        "IPYTHONDIR": home / "ipython",
    }
    settings = {
        "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
        # All cells are in the page, not just those on the screen, so that a test can find them.
        "notebook-extension/tracker": {"windowingMode": "none"},
    }
    for name, values in settings.items():
        path = home / "settings/@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    scripts = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    more = {"JUPYTER_PREFER_ENV_PATH": "1", "PYTHONPATH": paths, "PATH": scripts}
    return {**os.environ, **{name: str(path) for name, path in folders.items()}, **more}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


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
def page(lab):
    """Lesson 00, opened and run from top to bottom. `page.complaints` is what the console said."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.complaints = []
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.on("console", lambda line: note(page, line))
        page.goto(lab, timeout=START * 1000)
        page.locator(".jp-Notebook .jp-CodeCell").first.wait_for(timeout=START * 1000)
        run_all(page)
        yield page
        browser.close()


def note(page, line) -> None:
    if line.type == "error":
        page.complaints.append(f"{line.text} ({line.location['url']})")


def run_all(page) -> None:
    """The menu's own command, once the kernel is there; then wait until every cell has a number."""
    page.get_by_text("| Idle").wait_for(timeout=START * 1000)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    deadline = time.monotonic() + LESSON_RUN
    prompts = page.locator(".jp-Notebook .jp-CodeCell .jp-InputPrompt")
    while not all_ran(said := prompts.all_inner_texts()):
        if errors := page.locator(STDERR).all_inner_texts():
            pytest.fail(f"a cell failed:\n{errors[0]}")
        if time.monotonic() > deadline:
            pytest.fail(f"after {LESSON_RUN} s the cells' numbers are {said}")
        time.sleep(0.5)
    page.get_by_text("| Idle").wait_for(timeout=REACTION)


def all_ran(prompts: list[str]) -> bool:
    """Whether the prompts are [1]:, [2]: ... A cell whose source is hidden has an empty one."""
    wanted = [f"[{number}]:" for number in range(1, len(prompts) + 1)]
    return all(said in ("", number) for said, number in zip(prompts, wanted, strict=True))


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


def test_a_slider_moved_by_keyboard_redraws_figure_and_numbers(page):
    explorer = live(page, having="figure img")
    slider = explorer.get_by_role("slider").first
    figure, table = explorer.locator("figure img").first, explorer.locator("table").first
    before = figure.get_attribute("src"), table.text_content()
    assert slider.get_attribute("aria-label").strip(), "a screen reader has no name for it"
    at_the_end = slider.get_attribute("aria-valuenow") == slider.get_attribute("aria-valuemax")
    slider.focus()
    page.keyboard.press("ArrowLeft" if at_the_end else "ArrowRight")
    after = until(
        lambda: (figure.get_attribute("src"), table.text_content()),
        lambda now: now[0] != before[0] and now[1] != before[1],
        "neither the figure nor its numbers changed after an arrow key",
    )
    assert after[0].startswith("data:image/png;base64,")
    assert figure.get_attribute("alt").strip()


def test_a_quiz_explains_wrong_answers_and_the_right_one(page):
    quiz = live(page, having=".dz-choice")
    question = quiz.locator(".widget-vbox").filter(has=page.locator(".dz-choice")).first
    choices, said = question.locator(".dz-choice"), question.get_by_role("alert")
    score = quiz.get_by_role("status")
    assert said.count() == 0 and score.inner_text().startswith("0 of ")

    def answer(choice: int) -> str:
        """Choose by keyboard; the explanation that comes."""
        before = said.inner_text() if said.count() else ""
        choices.nth(choice).focus()
        page.keyboard.press("Enter")
        return until(
            lambda: said.inner_text() if said.count() else "",
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


def test_the_console_stayed_silent(page):
    assert page.complaints == []
