"""Figures, quizzes, predictions and sliders: what they show, what they store, how they behave."""

import base64
import io
import re
from dataclasses import dataclass
from itertools import chain, combinations

import numpy as np
import pytest
import torch

from ddpz_lite import show
from ddpz_lite.course import interactive
from ddpz_lite.course.show import live, page, predictions, quizzes, ranks, sliders, style
from ddpz_lite.meter import TIMELINE_KINDS, MemoryTimeline
from ddpz_lite.meter import intervals as stretches
from ddpz_lite.model import MLP

OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "barrier")


@dataclass
class Record:
    rank: int
    op: str
    started: float
    finished: float
    bytes_sent: int = 0


@dataclass
class Span:
    rank: int
    name: str
    started: float
    finished: float


@dataclass
class Run:
    world_size: int
    spans: list
    ledger: list

    def bytes_sent(self):
        sent = {rank: {} for rank in range(self.world_size)}
        for r in self.ledger:
            sent[r.rank][r.op] = sent[r.rank].get(r.op, 0) + r.bytes_sent
        return sent


@pytest.fixture
def run():
    spans = [Span(r, "forward", 10.0 + r, 14.0) for r in range(2)]
    spans += [Span(r, "backward", 14.0, 18.0) for r in range(2)]
    records = [Record(r, "all_reduce", 16.0, 20.0, 3_000_000) for r in range(2)]
    return Run(2, spans, [*records, Record(1, "broadcast", 19.0, 20.0, 5)])


@pytest.fixture
def shown(monkeypatch):
    """What reaches the page, as mime bundles, as in a kernel."""
    bundles = []

    def emit(html, text, **more):
        bundles.append({"text/html": html, "text/plain": text, **more})

    for module in (page, live):
        monkeypatch.setattr(module, "emit", emit)
    for module in (live, quizzes, predictions, sliders):
        monkeypatch.setattr(module, "in_notebook", lambda: True)
    return bundles


def a_figure():
    fig, axes = show.figure()
    axes.plot([1, 2, 3], [3, 1, 2])
    return fig


def picture_in(html):
    from PIL import Image

    return Image.open(io.BytesIO(base64.b64decode(re.search(r"base64,([^\"]+)", html)[1])))


# ---- the door


def test_show_figure_leaves_alt_text_and_table(shown):
    rows = [["kind", "bytes"], ["`params` <new>", 1234567], ["ratio", 0.33333]]
    show.show_figure(a_figure(), alt='Three points, "up" & down', table=rows)
    [bundle] = shown
    html = bundle["text/html"]
    assert html.startswith("<figure") and html.count("<img ") == 1
    assert 'alt="Three points, &quot;up&quot; &amp; down"' in html
    assert "<details><summary>" in html and ">1,234,567</td>" in html and ">0.3333</td>" in html
    assert "<code>params</code> &lt;new&gt;" in html
    assert bundle["text/plain"] == 'Three points, "up" & down'
    assert 900 < picture_in(html).width < 1200 and len(html) < 100_000


def test_figures_are_the_same_bytes_each_time_and_hold_no_metadata():
    first, second = (page.figure_html(a_figure(), alt="a", table=[["x"], [1]]) for _ in range(2))
    assert first == second
    assert picture_in(first).info.keys() <= {"dpi"}


def test_pyplot_figures_are_closed():
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    fig, _ = pyplot.subplots()
    page.figure_html(fig, alt="a", table=[["x"], [1]])
    assert not pyplot.get_fignums()


@pytest.mark.parametrize(
    ("alt", "table", "message"),
    [
        (" ", [["x"], [1]], "alt is empty"),
        ("a", [], "header row and at least one row"),
        ("a", [["x", "y"]], "header row and at least one row"),
        ("a", [["x", "y"], [1]], r"rows of lengths \[2, 1\]"),
    ],
)
def test_show_figure_refuses(alt, table, message):
    with pytest.raises(ValueError, match=message):
        show.show_figure(a_figure(), alt=alt, table=table)


def test_outside_a_notebook_the_words_are_printed(capsys):
    show.show_figure(a_figure(), alt="Three points.", table=[["x"], [1]])
    show.hint("Ask `dist`.", "Hint 1")
    assert capsys.readouterr().out == "Three points.\nHint 1: Ask `dist`.\n"


def test_hint_is_closed_and_escaped(shown):
    show.hint("Is a < b?")
    assert shown[0]["text/html"].startswith("<details><summary>Hint</summary><p>Is a &lt; b?")


def test_a_missing_library_is_one_line_with_a_fix():
    with pytest.raises(ModuleNotFoundError, match=r"not_there.* pip install \"\.\[lab\]\""):
        style.need("not_there.deep")


# ---- the style


def luminance(color):
    rgb = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    return np.array(linear)


def contrast(one, other):
    """WCAG 2.1, contrast ratio of two colours."""
    weights = np.array([0.2126, 0.7152, 0.0722])
    low, high = sorted(float(weights @ luminance(c)) for c in (one, other))
    return (high + 0.05) / (low + 0.05)


def test_text_contrast_is_enough():
    assert contrast(style.TEXT_COLOR, style.CARD) > 12
    assert contrast(style.MUTED_COLOR, style.CARD) > 4.5
    assert contrast(style.IDLE.color, style.CARD) > 1.3


# Machado, Oliveira and Fernandes 2009, table 1 at severity 1: what each eye makes of linear RGB.
BLINDNESS = {
    "protan": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deutan": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritan": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}


@pytest.mark.parametrize("names", [TIMELINE_KINDS, OPS, ("forward", "backward", "step", *OPS)])
def test_series_stay_apart_for_every_eye(names):
    """Any two series of one picture differ in colour for each eye, or in hatch."""
    looks = [style.style_of(name) for name in names]
    for one, other in combinations(looks, 2):
        for eye in BLINDNESS.values():
            seen = [np.array(eye) @ luminance(x.color) for x in (one, other)]
            assert one.hatch != other.hatch or np.abs(seen[0] - seen[1]).max() > 0.1


def test_names_without_a_look_get_free_ones():
    among = ["forward", "load data", "wait"]
    looks = [style.style_of(name, among) for name in among]
    assert len(set(looks)) == 3
    assert style.style_of("wait", among) == looks[2]


def test_house_style_leaves_no_trace():
    import matplotlib

    before = dict(matplotlib.rcParams)
    a_figure()
    assert dict(matplotlib.rcParams) == before


# ---- pictures of runs


def test_timeline_model(run):
    rows = ranks.bars(run)
    ends = [end for row in rows for stretches in row.values() for end in chain(*stretches)]
    assert min(ends) == 0 and max(ends) == 10
    assert stretches.union([(3, 4), (0, 1), (0.5, 2)]) == [(0, 2), (3, 4)]
    assert stretches.gaps([(1, 2), (1.5, 3)], until=5) == [(0, 1), (3, 5)]
    assert stretches.gaps([(0, 5)], until=5) == []
    free = [stretches.gaps(chain(*row.values()), until=10) for row in rows]
    table = ranks._timeline_table(rows, free)
    assert table[0] == [
        "rank", "forward, ms", "backward, ms", "all_reduce, calls", "all_reduce, ms",
        "broadcast, calls", "broadcast, ms", "idle, ms",
    ]  # fmt: skip
    assert table[1] == [0, 4000, 4000, 1, 4000, 0, 0, 0]
    assert table[2] == [1, 3000, 4000, 1, 4000, 1, 1000, 1000]


def test_timeline_picture(run, shown):
    show.timeline(run)
    text = shown[0]["text/plain"]
    assert text.startswith("Timeline of 2 ranks over 10 s. Mean per rank: forward 3.5 s,")
    assert text.endswith("Idle the longest: rank 1, 10% of the time.")
    run.spans = []
    show.timeline(run)
    assert "In no call the longest" in shown[1]["text/plain"]
    with pytest.raises(ValueError, match=r"recorded nothing.*record=True"):
        show.timeline(Run(2, [], []))


def test_a_timeline_draws_no_more_bars_than_are_visible(monkeypatch):
    drawn = []
    monkeypatch.setattr(ranks, "show_figure", lambda fig, **_: drawn.append(fig))
    for calls in (5, 10_000):
        show.timeline(Run(1, [], [Record(0, "all_reduce", i, i + 0.5) for i in range(calls)]))
    few, many = (sum(len(c.get_paths()) for c in fig.axes[0].collections) for fig in drawn)
    assert few == 5 + 4  # the calls, and what lies between them
    assert many < 20


def test_only_narrow_bars_are_joined():
    wide, narrow = [(0, 5), (5, 9), (9, 9.2)], [(10.3, 10.4), (10.5, 10.6), (11.7, 11.8)]
    joined = [*wide, (10.3, 10.6), (11.7, 11.8)]
    assert ranks._visible([*wide, *narrow], least=1) == joined


def test_traffic(run, shown):
    show.traffic(run)
    assert shown[0]["text/plain"] == (
        "2 ranks sent 3 MB each. Over all ranks: all_reduce 6 MB, broadcast 5 bytes."
    )
    assert ">3,000,005</td>" in shown[0]["text/html"]
    with pytest.raises(ValueError, match="sent nothing that was recorded"):
        show.traffic(Run(2, [], []))


def test_memory_bars(shown):
    held = {"parameters": 4000, "gradients": 4000, "optimizer": 8016, "buffers": 0, "transient": 0}
    show.memory(held)
    show.memory({"one": held, "two": {"parameters": 1}}, title="Before and after")
    assert shown[0]["text/plain"] == (
        "Memory by kind. now: 16.02 kB, parameters 4 kB, gradients 4 kB, optimizer 8.016 kB."
    )
    assert "buffers" not in shown[0]["text/html"] and ">8,016</td>" in shown[0]["text/html"]
    assert shown[1]["text/plain"].startswith("Before and after. one: 16.02 kB")
    with pytest.raises(ValueError, match="every kind holds 0 bytes"):
        show.memory({"parameters": 0})
    with pytest.raises(ValueError, match="every kind holds 0 bytes"):
        show.memory({})


def test_memory_over_a_step(shown):
    model = MLP([30, 50, 3])
    optimizer = torch.optim.AdamW(model.parameters())
    with MemoryTimeline(model, optimizer) as timeline:
        model(torch.randn(4, 30)).sum().backward()
        optimizer.step()
    show.memory(timeline)
    html, text = shown[0]["text/html"], shown[0]["text/plain"]
    assert f"The peak is {show.in_bytes(timeline.peak)}" in text
    for moment in ("forward", "backward", "step", "peak", "end"):
        assert f">{moment}</td>" in html
    assert f">{sum(timeline.samples[-1][1].values()):,}</td>" in html


@pytest.mark.parametrize("gap", [0.0001, 0.004, 0.2])  # seconds, of 0.5
def test_labels_of_marks_that_are_close_do_not_overlap(monkeypatch, gap):
    drawn = []
    monkeypatch.setattr(show.memory_charts, "show_figure", lambda fig, **_: drawn.append(fig))

    class Known(MemoryTimeline):
        samples = tuple(
            (t / 10, dict.fromkeys(TIMELINE_KINDS, n)) for t, n in [(0, 1), (1, 2), (5, 1)]
        )
        marks = (0.1, "forward"), (0.1 + gap, "backward"), (0.5, "end")

    timeline = Known(MLP([1, 1]))
    show.memory(timeline)
    (axes,) = drawn[0].axes
    drawn[0].draw_without_rendering()
    assert [text.get_text() for text in axes.texts] == ["peak 14 bytes", "forward", "backward"]
    boxes = [text.get_window_extent(drawn[0].canvas.get_renderer()) for text in axes.texts]
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


def test_send_and_recv_at_the_same_time_do_not_hide_each_other(monkeypatch):
    drawn = []
    monkeypatch.setattr(ranks, "show_figure", lambda fig, **_: drawn.append(fig))
    spans = [Span(0, "ring", 0.0, 4.0)]
    show.timeline(Run(1, spans, [Record(0, "send", 0.0, 2.0), Record(0, "recv", 1.0, 3.0)]))
    show.timeline(Run(1, spans, [Record(0, "send", 0.0, 2.0), Record(0, "recv", 2.0, 3.0)]))
    heights = []
    for fig in drawn:
        named = [c for c in fig.axes[0].collections if len(c.get_paths()) == 1]
        boxes = [c.get_paths()[0].get_extents() for c in named]
        heights.append(sorted(round(box.height, 2) for box in boxes))
    assert heights[0].count(0.18) == 2 and 0.18 not in heights[1]


# ---- widgets


def questions():
    return [
        show.ask("2 + 2 in `int`?", show.wrong("3", "Too few."), show.right("`4`", "Yes, four.")),
        show.ask("Is 1 < 2?", show.right("yes", "It is."), show.wrong("no", "Count.")),
    ]


def widgets_in(bundle):
    """The widgets on the page behind a bundle, in order."""
    import ipywidgets

    registry = ipywidgets.widgets.widget._instances
    box = registry[bundle[live.VIEW]["model_id"]]

    def walk(widget):
        yield widget
        for child in getattr(widget, "children", ()):
            yield from walk(child)

    return list(walk(box))


def test_quiz_buttons_explain_both_ways(shown):
    show.quiz(questions())
    still, alive = shown
    widgets = widgets_in(alive)
    buttons = [w for w in widgets if type(w).__name__ == "Button"]
    assert [b.description for b in buttons][:2] == ["a)  3", "b)  4"]

    def status():
        return " ".join(w.value for w in widgets if type(w).__name__ == "HTML")

    buttons[0].click()
    assert "✗ Not right. Too few." in status() and buttons[0].description == "✗  a)  3"
    buttons[1].click()
    assert "✓ Right. Yes, four." in status() and "1 of 2 answered, 1 right." in status()
    assert 'role="alert"' in status() and 'role="status"' in status()
    html = still["text/html"]
    assert html.count("<details>") == 2 and "Is 1 &lt; 2?" in html and "✗ Not right. Count." in html


def test_a_quiz_shows_its_choices_after_something_was_typed(shown):
    show.quiz(questions(), first="Which line?")
    still, alive = shown
    widgets = widgets_in(alive)
    box = next(w for w in widgets if type(w).__name__ == "Text")
    hidden = [w for w in widgets if w.layout.display == "none" and type(w).__name__ == "VBox"]
    assert len(hidden) == 1 and hidden[0].children[0].children[1].description == "a)  3"
    box.value = "  "
    assert hidden[0].layout.display == "none"
    box.value = "<15>"
    assert hidden[0].layout.display is None and box.disabled
    assert any("You typed &lt;15&gt;." in getattr(w, "value", "") for w in widgets)
    assert still["text/html"].index("Which line?") < still["text/html"].index("The choices")
    assert still["text/plain"].startswith("Which line?")


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([("a", "why", True)], "at least two answers"),
        ([("a", "why", True), ("a", "why", False)], "all different"),
        ([("a", "why", True), ("b", "why", True)], "exactly one right"),
        ([("a", "why", False), ("b", "why", False)], "exactly one right"),
        ([("a", "why", True), ("b", " ", False)], "'b' does not say why"),
    ],
)
def test_questions_are_checked(answers, message):
    with pytest.raises(ValueError, match=message):
        show.ask("Q?", *(show.Answer(*answer) for answer in answers))


def test_an_empty_quiz_is_refused():
    with pytest.raises(ValueError, match="at least one question"):
        show.quiz([])


def test_prediction_headless(capsys):
    guess = show.predict("How many bytes?", default=12, unit="bytes")
    assert guess.value == 12 and guess.verdict == "Not measured yet."
    guess.reveal(16)
    assert capsys.readouterr().out == (
        "Predict. How many bytes?\nDefault: 12 bytes\n"
        "predicted  12 bytes  (the default: no prediction entered)\nmeasured   16 bytes\n"
        "Not right: measured / predicted = 1.33\n"
    )
    with pytest.raises(RuntimeError, match=r"known \(16 bytes\)"):
        guess.commit(16)


def test_verdict_of_an_index_names_no_distance(capsys):
    for guess, verdict in ((1, "Not right."), (2, "Exactly right.")):
        prediction = show.predict("Which rank?", default=guess, index=True)
        prediction.reveal(2)
        assert prediction.verdict == verdict


@pytest.mark.parametrize(
    ("guess", "measured", "within", "verdict"),
    [
        (4, 4, None, "Exactly right."),
        (100, 95, None, "Not right: measured / predicted = 0.95"),
        (0, 3, None, "Not right: off by 3"),
        (-2, 3, None, "Not right: off by 5"),
        (2, 2.5, None, "measured / predicted = 1.25"),
        (100, 95, 0.1, "Close: within 10%, measured / predicted = 0.95"),
        (10, 4, 0.001, "Outside tolerance: more than 0.1% away, measured / predicted = 0.4"),
        (10, 1, 0.1, "Outside tolerance: more than 10% away, measured / predicted = 0.1"),
        (0.5, 0.47, 0.05, "Outside tolerance: more than 5% away, measured / predicted = 0.94"),
    ],
)
def test_verdicts(guess, measured, within, verdict, capsys):
    prediction = show.predict("?", default=guess, within=within)
    prediction.reveal(measured)
    assert prediction.verdict == verdict


@pytest.mark.parametrize(
    ("text", "number"), [("6", 6), (" 1,200 ", 1200), ("1.2e3", 1200), ("-.5", -0.5)]
)
def test_what_is_a_number(text, number):
    guess = show.predict("?", default=1)
    guess.commit(text)
    assert guess.value == number and not isinstance(guess.value, str)


@pytest.mark.parametrize("text", ["six", "", "6 messages", "1.2.3", "nan", "inf", "1e400"])
def test_what_is_not_a_number(text):
    guess = show.predict("?", default=1)
    with pytest.raises(ValueError, match=r"is not a number|must be a finite number"):
        guess.commit(text)
    assert guess.committed is None


def test_the_box_starts_empty_and_commits_until_revealed(shown, capsys):
    guess = show.predict("How many?", default=12, unit="bytes", low=0)
    widgets = widgets_in(shown[1])
    box = next(w for w in widgets if type(w).__name__ == "Text")
    status = [w for w in widgets if type(w).__name__ == "HTML"][1]
    assert (box.value, box.description) == ("", "Your prediction, bytes")
    box.value = "14"
    assert guess.value == 14 and "Committed: 14 bytes" in status.value
    box.value = "six"
    assert guess.committed is None and "'six' is not a number" in status.value
    box.value = "-1"
    assert guess.committed is None and "out of range" in status.value
    box.value = "15"
    guess.reveal(15)
    out = capsys.readouterr().out
    assert box.disabled and "Exactly right." in out and "default" not in out
    assert "12 bytes" in shown[0]["text/html"]


def test_the_measuring_cell_asks_for_a_commitment(shown, capsys, monkeypatch):
    """Without a number in the box, `reveal` asks until there is one, before it shows the answer."""
    typed = iter(["six", "7"])
    monkeypatch.setattr(interactive, "notebook", lambda: True)
    monkeypatch.setattr("builtins.input", lambda prompt: print(prompt) or next(typed))
    guess = show.predict("How many?", default=12, unit="bytes")
    guess.reveal(8)
    assert capsys.readouterr().out.splitlines() == [
        "Commit to a number first. How many?",
        "Your prediction, bytes (Enter takes 12 bytes): ",
        "'six' is not a number. Write it in digits, such as 1,200 or 1.2e3.",
        "Your prediction, bytes (Enter takes 12 bytes): ",
        "predicted  7 bytes",
        "measured   8 bytes",
        "Not right: measured / predicted = 1.14",
    ]


def test_an_empty_line_takes_the_default(shown, capsys, monkeypatch):
    """So Run All continues with Enter, and the output says that nothing was entered."""
    monkeypatch.setattr(interactive, "notebook", lambda: True)
    monkeypatch.setattr("builtins.input", lambda prompt: "")
    show.predict("How many?", default=12, unit="bytes").reveal(12)
    out = capsys.readouterr().out
    assert "predicted  12 bytes  (the default: no prediction entered)" in out


def test_predictions_are_checked():
    with pytest.raises(ValueError, match="outside 0 to 10"):
        show.predict("?", default=12, low=0, high=10)
    with pytest.raises(ValueError, match="a share between 0 and 1"):
        show.predict("?", default=12, within=10)
    with pytest.raises(ValueError, match="finite number, got nan"):
        show.predict("?", default=float("nan"))
    with pytest.raises(ValueError, match="finite number, got 'x'"):
        show.predict("?", default=1).reveal("x")


def draw(world, mode):
    fig, axes = show.figure(height=2)
    axes.bar([0], [world])
    return fig, f"{world} ranks, {mode}", [["world", "mode"], [world, mode]]


KNOBS = {
    "world": show.slider("World size", 1, 8, default=4, unit="ranks"),
    "mode": show.options("Mode", ["ring", "tree"], default="tree"),
}


def test_explore_draws_again_and_leaves_a_still(shown):
    show.explore(draw, **KNOBS)
    still, alive = shown
    assert 'alt="4 ranks, tree"' in still["text/html"] and "Run the cell" in still["text/html"]
    widgets = widgets_in(alive)
    picture = next(w for w in widgets if 'alt="' in getattr(w, "value", "").__str__())
    slider = next(w for w in widgets if type(w).__name__ == "IntSlider")
    menu = next(w for w in widgets if type(w).__name__ == "Dropdown")
    assert (slider.description, menu.description) == ("World size, ranks", "Mode")
    slider.value = 5
    assert 'alt="5 ranks, tree"' in picture.value
    menu.value = "ring"
    assert 'alt="5 ranks, ring"' in picture.value


def test_a_slider_ends_where_the_other_sliders_say(shown):
    """No position of it is dead, and a value past the new end becomes the last."""
    most = {"tree": 8, "ring": 5}
    world = show.slider("World size", 2, 8, default=8, until=lambda mode: most[mode])
    show.explore(draw, world=world, mode=KNOBS["mode"])
    widgets = widgets_in(shown[1])
    picture = next(w for w in widgets if 'alt="' in str(getattr(w, "value", "")))
    slider = next(w for w in widgets if type(w).__name__ == "IntSlider")
    menu = next(w for w in widgets if type(w).__name__ == "Dropdown")
    assert (slider.max, slider.value) == (8, 8)
    menu.value = "ring"
    assert (slider.max, slider.value) == (5, 5) and 'alt="5 ranks, ring"' in picture.value
    menu.value = "tree"
    assert (slider.max, slider.value) == (8, 5)
    slider.value = 7
    assert 'alt="7 ranks, tree"' in picture.value


def test_a_figure_that_fails_says_so_and_raises(shown):
    def fragile(world):
        if world > 2:
            raise ZeroDivisionError("too many")
        return draw(world, "ring")

    show.explore(fragile, world=show.slider("World", 1, 4, default=2))
    widgets = widgets_in(shown[1])
    slider = next(w for w in widgets if type(w).__name__ == "IntSlider")
    with pytest.raises(ZeroDivisionError):
        slider.value = 3
    assert any("The figure failed" in str(getattr(w, "value", "")) for w in widgets)


def test_fractions_on_a_slider_are_exact():
    slider = show.slider("α", 0.1, 0.5, default=0.3, step=0.1)
    assert slider.values == (0.1, 0.2, 0.3, 0.4, 0.5)
    assert slider.nearest(0.30000000000000004) == 0.3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: show.slider("W", 1, 8, default=9), "default 9 is not among"),
        (lambda: show.slider("W", 8, 1, default=8), "high > low"),
        (lambda: show.slider(" ", 1, 8, default=2), "needs a label"),
        (lambda: show.options("W", [1], default=1), "two or more"),
        (lambda: show.Explorer(draw), "at least one slider"),
    ],
)
def test_sliders_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_each_widget_leaves_a_static_version_and_itself(shown):
    show.quiz(questions())
    show.predict("How many?", default=1)
    show.explore(draw, **KNOBS)
    for still, alive in zip(shown[::2], shown[1::2], strict=True):
        name = re.search(r'class="dz-still" id="(dz-\w+)"', still["text/html"])[1]
        assert live.VIEW not in still and live.VIEW in alive
        box = widgets_in(alive)[0]
        assert "dz-live" in box._dom_classes
        assert f"#{name}" in box.children[-1].value, "the live widget hides its own still form"
        assert alive["text/html"].strip() and alive["text/plain"].strip()


def test_in_a_kernel_and_exported(make_notebook):
    """A stored notebook shows the still forms in exported HTML, and no warning or error."""
    import nbformat
    from nbclient import NotebookClient
    from nbconvert import HTMLExporter

    from ddpz_lite.course.cli.kernel import AsyncManager

    path = make_notebook(
        "widgets",
        "from ddpz_lite import show\n"
        "show.quiz([show.ask('Q?', show.right('a', 'so'), show.wrong('b', 'no'))])\n"
        "guess = show.predict('How many?', default=3)\n"
        "guess.reveal(3)",
        "def draw(n):\n"
        "    fig, axes = show.figure()\n"
        "    return fig, f'{n} here', [['n'], [n]]\n"
        "show.explore(draw, n=show.slider('N', 1, 3, default=2))",
    )
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
    options = {"kernel_manager_class": AsyncManager, "store_widget_state": False}
    NotebookClient(notebook, timeout=200, **options).execute()
    outputs = [output for cell in notebook.cells for output in cell.outputs]
    assert all(output.output_type in ("display_data", "stream") for output in outputs)
    assert all(output.get("name") != "stderr" for output in outputs)
    assert any("no prediction entered" in output.get("text", "") for output in outputs)
    html, _ = HTMLExporter().from_notebook_node(notebook)
    assert html.count('class="dz-still"') == 3 and 'alt="2 here"' in html
    assert "widget-view+json" not in html
