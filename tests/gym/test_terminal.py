"""`ddpz gym` in a terminal, and the lines of the gallery."""

from __future__ import annotations

import io
import json
import re
from datetime import date, timedelta
from pathlib import Path

import pytest

from ddpz_lite.course import cli
from ddpz_lite.course.gym.bank import cards
from ddpz_lite.course.gym.deck import Deck
from ddpz_lite.course.gym.gallery import raised

LESSONS = Path(__file__).resolve().parents[2] / "lessons"


@pytest.fixture
def gym(tmp_path, monkeypatch, capsys):
    """gym("typed\\n", "--new", "1") -> (exit status, what was printed, what went wrong)."""
    monkeypatch.setenv("DDPZ_HOME", str(tmp_path))

    def run(typed: str, *options: str):
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        status = cli.main(["gym", *options])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def test_the_answer_is_hidden_until_one_has_written(gym):
    status, out, _ = gym("", "--topic", "zero", "--new", "1")
    assert status == 0 and "What is ZeRO?" in out and "Rajbhandari" not in out
    assert not Deck.load().memories, "the input ended, and nothing was rated"


def test_a_card_is_asked_proved_rated_and_kept(gym):
    _, out, _ = gym("it divides\nthe states\n\nx\n3\n", "--topic", "zero", "--new", "1")
    (name, section), *_ = re.findall(r"(?:proof|shown): lessons/(\S+\.ipynb), section “(.+)”", out)
    cells = json.loads((LESSONS / name).read_text(encoding="utf-8"))["cells"]
    assert any(re.search(f"^#+ {re.escape(section)}$", "".join(c["source"]), re.M) for c in cells)
    assert "Rajbhandari" in out and "1 of 1 known" in out and "in 10 minutes" in out
    memory = Deck.load().memories["Q13"]
    assert (memory.seen, memory.failed, memory.answer) == (1, 0, "it divides\nthe states")


def test_an_empty_answer_is_not_asked_how_it_was(gym):
    _, out, _ = gym("\n", "--topic", "zero", "--new", "1")
    assert "How was it?" not in out and "0 of 1 known" in out
    assert Deck.load().memories["Q13"].failed == 1


def test_cards_are_asked_in_chinese_and_topics_found_by_it(gym):
    _, out, _ = gym("\n", "--topic", "出处", "--new", "1", "--language", "zh")
    assert "分别出自哪篇论文" in out and "Which papers" not in out


def test_in_chinese_nothing_around_the_cards_is_english(gym):
    options = ("--topic", "zero", "--language", "zh")
    _, out, _ = gym("x\n\n3\n", *options, "--new", "1")
    assert re.search("(验证|演示)：lessons/", out) and "”一节" in out and "出处：Rajbhandari" in out
    left = sum(card.topic.en == "ZeRO" for card in cards().values()) - 1
    next_one = f"下一张卡片 10 分钟后到期；还有 {left} 张没见过。\n"
    assert out.endswith("共 1 张，会 1 张。" + next_one)
    _, out, _ = gym("", *options, "--new", "0")
    assert out == next_one


def test_the_day_of_an_interview_makes_a_plan_that_later_calls_follow(gym):
    by = (date.today() + timedelta(days=30)).isoformat()
    _, out, _ = gym("", "--by", by)
    assert re.search(rf"30 days until your interview on {by}\. \d+ cards .*weak topics first", out)
    _, out, _ = gym("")
    assert "30 days until" in out
    _, out, _ = gym("", "--by", (date.today() + timedelta(days=1)).isoformat())
    assert "no new cards now" in out
    _, out, _ = gym("", "--by", "never")
    assert "until your interview" not in out and "1 of 5" in out


def test_a_day_that_is_no_day_or_over_is_refused_and_forgotten(gym, capsys):
    with pytest.raises(SystemExit):
        gym("", "--by", "3 December")
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith("takes a day, as 2026-12-03, or never, not '3 December'")
    status, _, err = gym("", "--by", "2020-01-01")
    assert status == 2 and "the interview was on 2020-01-01. Fix:" in err
    assert gym("")[0] == 0


def test_what_was_not_known_is_asked_again_before_the_session_ends(gym):
    _, out, _ = gym("\n" * 9, "--topic", "zero", "--new", "1")
    assert out.count("What is ZeRO?") == 3 and "3 of 3 · Q13" in out


@pytest.mark.parametrize("value", ["-1", "some", "1.5"])
def test_a_bad_number_of_new_cards_is_refused(gym, capsys, value):
    with pytest.raises(SystemExit):
        gym("", "--new", value)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith(f"argument --new: takes a whole number, 0 or more, not '{value}'")


def test_an_interview_ends_with_a_table(gym):
    _, out, _ = gym("\n" * 12, "--mock", "--seed", "3")
    assert "12 of 12" in out and re.search(r"^all +0 of 12", out, re.M)


def test_nothing_due_says_when(gym):
    _, out, _ = gym("x\n\n4\n", "--topic", "sources", "--only", "questions")
    _, out, _ = gym("", "--topic", "sources", "--only", "questions")
    assert re.search(r"The next card is due in \d+ days; 0 were never seen", out)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--topic", "quantum"], "no topic has 'quantum' in its name: Foundations; DDP"),
        (["--topic", "design", "--only", "myths"], "this topic has no myths"),
    ],
)
def test_an_unknown_topic_is_answered_with_the_known_ones(gym, options, says):
    status, _, err = gym("", *options)
    assert status == 2 and says in err


def test_a_damaged_file_is_one_line(gym, tmp_path):
    (tmp_path / "gym.json").write_text("[")
    status, _, err = gym("")
    assert status == 2 and "Fix: move it away" in err


# ---- the gallery ----


def test_each_line_runs_by_itself_and_says_what_it_raised():
    lines = ["x = 1", "print(x)", "import no_such_module_xyz", "raise SystemExit(3)", "print('hi')"]
    assert raised(lines) == [
        "",
        "NameError: name 'x' is not defined",
        "ModuleNotFoundError: No module named 'no_such_module_xyz'",
        "SystemExit: 3",
        "",
    ]


def test_a_process_that_dies_is_an_error():
    with pytest.raises(RuntimeError, match="gallery: the process ended with 7"):
        raised(["import os; os._exit(7)"])
