"""Multiple-choice questions whose answers explain themselves, right or wrong.

    quiz([
        ask("How many processes does `dz.launch(f, world_size=4)` start?",
            wrong("One, with four threads", "Threads would share one interpreter."),
            right("Four", "One process per rank, each with an interpreter of its own.")),
    ])

`Quiz` is what is known and answered; the view around it is ipywidgets, reachable by keyboard: Tab
to a question, arrows to choose, Tab and Space to check.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddpz_lite.course.show.live import show_live
from ddpz_lite.course.show.page import in_notebook, prose
from ddpz_lite.course.show.style import need


@dataclass(frozen=True)
class Answer:
    """One choice, whether it is right, and why."""

    text: str
    why: str
    right: bool

    @property
    def verdict(self) -> str:
        """What the learner reads after choosing it, right or wrong said in words, not in colour."""
        return f"{'✓ Right.' if self.right else '✗ Not right.'} {self.why}"


@dataclass(frozen=True)
class Question:
    """A question and its choices, exactly one of them right."""

    text: str
    answers: tuple[Answer, ...]


def right(text: str, why: str) -> Answer:
    """The right answer, and why it is."""
    return Answer(text, why, True)


def wrong(text: str, why: str) -> Answer:
    """A wrong answer, and what is wrong with it."""
    return Answer(text, why, False)


def ask(text: str, *answers: Answer) -> Question:
    """A question. Raises ValueError unless its answers differ, say why, and one is right."""
    if len(answers) < 2 or len({answer.text for answer in answers}) < len(answers):
        raise ValueError(f"ask: {text!r} needs at least two answers, all different.")
    if sum(answer.right for answer in answers) != 1:
        raise ValueError(f"ask: {text!r} needs exactly one right answer.")
    for answer in answers:
        if not answer.why.strip():
            raise ValueError(
                f"ask: {text!r}: the answer {answer.text!r} does not say why it is right or wrong."
            )
    return Question(text, answers)


@dataclass
class Quiz:
    """The state of a quiz: which answers were given, the last one per question."""

    questions: Sequence[Question]
    given: dict[int, int] = field(default_factory=dict)

    def answer(self, question: int, choice: int) -> Answer:
        """Give an answer, by position; giving another one later is allowed."""
        chosen = self.questions[question].answers[choice]
        self.given[question] = choice
        return chosen

    @property
    def score(self) -> str:
        """How it stands, in words."""
        rights = sum(self.questions[q].answers[a].right for q, a in self.given.items())
        return f"{len(self.given)} of {len(self.questions)} answered, {rights} right."


def quiz(questions: Sequence[Question], *, first: str = "") -> None:
    """Show a quiz. Without a kernel: the questions, with the answers behind a click.

    first: what the learner is to type before the choices appear, such as "Which line?"; without a
    kernel the choices are then behind a click, too.
    """
    if not questions:
        raise ValueError("quiz: give at least one question: quiz([ask(...)]).")
    state = Quiz(tuple(questions))
    controls = _view(state) if in_notebook() else []
    still, text = _still(state), _text(state)
    if first:
        controls = _typed_first(first, controls) if controls else []
        still = f"<p>{prose(first)}</p><details><summary>The choices</summary>{still}</details>"
        text = f"{first}\n{text}"
    show_live(controls, still=still, text=text)


def _typed_first(first: str, controls: list[Any]) -> list[Any]:
    """The controls behind a box: they appear when something was typed into it."""
    ipywidgets = need("ipywidgets")
    question, noted = ipywidgets.HTML(f"<p>{prose(first)}</p>"), ipywidgets.HTML()
    box = ipywidgets.Text(
        placeholder="your answer",
        description="Typed",
        continuous_update=False,  # committed by Enter, or by leaving the box
    )
    choices = ipywidgets.VBox(controls, layout={"display": "none"})

    def committed(change: dict[str, Any]) -> None:
        typed = change["new"].strip()
        if typed:
            noted.value = f'<p role="status">You typed {html.escape(typed)}. Now choose.</p>'
            choices.layout.display = None
            box.disabled = True

    box.observe(committed, "value")
    return [question, box, noted, choices]


def _view(state: Quiz) -> list[Any]:
    ipywidgets = need("ipywidgets")
    score = ipywidgets.HTML()

    def tell() -> None:
        score.value = f'<p role="status">{state.score}</p>'

    tell()
    return [*(_question_view(state, i, tell) for i in range(len(state.questions))), score]


def _question_view(state: Quiz, number: int, tell: Callable[[], None]) -> Any:
    """One question: a button per answer, and under them what the chosen one has to say."""
    ipywidgets = need("ipywidgets")
    question = state.questions[number]
    text = ipywidgets.HTML(f"<p><b>{number + 1}.</b> {prose(question.text)}</p>")
    verdict = ipywidgets.HTML()

    def choice(place: int, answer: Answer) -> Any:
        label = f"{chr(97 + place)})  {answer.text.replace('`', '')}"
        button = ipywidgets.Button(description=label, tooltip=f"Question {number + 1}: choose")
        button.add_class("dz-choice")

        def chosen(_: Any) -> None:
            given = state.answer(number, place)
            button.description = f"{'✓' if given.right else '✗'}  {label}"
            verdict.value = f'<p role="alert">{prose(given.verdict)}</p>'
            tell()

        button.on_click(chosen)
        return button

    choices = [choice(place, answer) for place, answer in enumerate(question.answers)]
    return ipywidgets.VBox([text, *choices, verdict])


def _still(state: Quiz) -> str:
    parts = []
    for question in state.questions:
        choices = "".join(f"<li>{prose(answer.text)}</li>" for answer in question.answers)
        verdicts = "".join(
            f"<li><b>{prose(answer.text)}</b><br>{prose(answer.verdict)}</li>"
            for answer in question.answers
        )
        parts.append(
            f'<li><p>{prose(question.text)}</p><ol type="a">{choices}</ol>'
            f'<details><summary>Answers</summary><ol type="a">{verdicts}</ol></details></li>'
        )
    return f"<ol>{''.join(parts)}</ol>"


def _text(state: Quiz) -> str:
    lines = []
    for number, question in enumerate(state.questions, 1):
        lines.append(f"{number}. {question.text}")
        lines += [
            f"   {chr(96 + i)}) {answer.text}" for i, answer in enumerate(question.answers, 1)
        ]
    return "\n".join(lines)
