"""The pages "Questions" of the site: every card in English and Chinese, linked to its cells.

A page for each topic; their titles and the table of topics are on the first page. The links lead to
the very cell: `targets` puts a mark before each. Each card has a mark, too, its number: the search
page leads to the very card (see find.js).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ddpz_lite.course.gym.bank import Card, Words, cards, topics
from ddpz_lite.course.gym.proofs import LABELS, Proof, label, of

MOST_CELLS = 4  # that one answer is linked to
DOES = {  # what a cell does for a card
    "proves": "Proved by a run · 已由实际运行验证",
    "illustrates": "Shown in a run · 运行演示",
    "source": "Cited, not run · 引用，未运行",
}
HEAD = """\
# Questions

What interviews ask about distributed training, and {myths} sentences that articles print and that
are wrong. Each answer is linked to the cells that settle it, and says what they do. A cell *proves*
a claim if it fails under a change that makes the claim false, and a test applies that change. Other
cells *show* the thing. Names, dates and what no laptop can run are *cited*. To learn the answers,
run `ddpz gym`: it asks what you are about to forget, and `ddpz gym --by 2026-12-03` plans the days
up to your interview. {lesson}

分布式训练的面试题与常见误解，中英对照。每个回答都链接到相应的单元格，并注明其作用：*验证*（把条件改错，
单元格必须报错，有测试保证）、*演示*或*引用*。搜索框支持中文。

{counts}

| topic | 主题 | questions | myths |
|---|---|---:|---:|
"""
LESSON = "[Lesson 17](../lessons/17_interview_gym.ipynb) is where you practise."


def target(proof: Proof) -> str:
    """The name of a cell's mark."""
    return f"cell-{proof.lesson}-{proof.cell}"


def targets(proofs: Mapping[str, Sequence[Proof]]) -> dict[tuple[str, str], str]:
    """(file, cell) -> its mark, of every cell that settles something."""
    return {(p.file, p.cell): target(p) for cells in proofs.values() for p in cells}


def pages(proofs: Mapping[str, Sequence[Proof]]) -> dict[str, str]:
    """Name of a page -> its Markdown; the first is the one that leads to the others."""
    by_topic: dict[Words, list[Card]] = {}
    for card in cards().values():
        by_topic.setdefault(card.topic, []).append(card)
    named = {topic: name_of(topic) for topic in by_topic}
    there = any(p.file.startswith("17_") for cells in proofs.values() for p in cells)
    myths = sum(card.myth for card in cards().values())
    first = HEAD.format(myths=myths, lesson=LESSON if there else "", counts=_counts(proofs))
    for topic, ones in by_topic.items():
        asked = sum(not card.statement for card in ones)
        myths = sum(card.myth for card in ones)
        first += f"| [{topic.en}]({named[topic]}.md) | {topic.zh} | {asked} | {myths} |\n"
    found = {"index": first + "\n" + _index(proofs) + _toctree(named.values())}
    for topic, ones in by_topic.items():
        found[named[topic]] = _page(topic, ones, proofs)
    return found


def searched() -> list[dict[str, object]]:
    """What find.js looks through: of each card its place, its titles and its words."""
    return [
        {
            "at": f"questions/{name_of(card.topic)}.html#{card.id.lower()}",
            "title": {
                "en": f"{card.id} · {card.front.en}".replace("`", ""),
                "zh": f"{card.id} · {card.front.zh}".replace("`", ""),
            },
            "front": f"{card.id} {card.front.en} {card.front.zh}",
            "back": f"{card.back.en} {card.back.zh}",
        }
        for card in cards().values()
    ]


def name_of(topic: Words) -> str:
    """The file of a topic's page, without its ending."""
    return re.sub(r"\W+", "-", topic.en.lower()).strip("-")


def _counts(proofs: Mapping[str, Sequence[Proof]]) -> str:
    """How many questions, myths and topics are proved, shown, cited."""
    kinds = {
        "questions · 问题": [of(card, proofs) for card in cards().values() if not card.statement],
        "myths · 误解": [of(card, proofs) for card in cards().values() if card.myth],
        "topics · 主题": [proofs.get(key, ()) for key in topics()],
    }
    rows = ["| | proved · 验证 | shown · 演示 | cited · 引用 |", "|---|---:|---:|---:|"]
    for name, each in kinds.items():
        found = Counter(label(cells) for cells in each)
        rows.append(f"| {name} | " + " | ".join(str(found[kind]) for kind in LABELS) + " |")
    return "\n".join(rows)


def _page(topic: Words, ones: Sequence[Card], proofs: Mapping[str, Sequence[Proof]]) -> str:
    parts = [f"# {topic.en}" + (f" · {topic.zh}" if topic.zh != topic.en else "")]
    for kind, title in (("Q", "Questions · 问题"), ("M", "Myths · 误解"), ("V", "True · 正确")):
        there = [card for card in ones if card.id.startswith(kind)]
        if there:
            parts.append(f"## {title}")
        parts += [_card(card, of(card, proofs)) for card in there]
    return "\n\n".join(parts) + "\n"


def _card(card: Card, proved: Sequence[Proof]) -> str:
    quoted = "“{}”" if card.statement else "{}"
    parts = [
        f"({card.id})=\n### {card.id} · {quoted.format(_plain(card.front.en))}",
        _plain(card.back.en),
    ]
    front = card.front.zh if card.front.zh != card.front.en else ""
    parts += [f"**{quoted.format(_plain(front))}**"] if front else []
    parts.append(_plain(card.back.zh))
    if card.rubric:
        lines = [f"- {_plain(p.en)} · {_plain(p.zh)}" for p in card.rubric]
        parts.append("A good answer says · 好的回答会提到：\n\n" + "\n".join(lines))
    if card.follow:
        follow = f"{_plain(card.follow.en)} · {_plain(card.follow.zh)}"
        parts.append(f"They may ask next · 可能的追问：{follow}")
    below, lessons = [], []
    for kind, words in DOES.items():
        cells = []
        for proof in (proof for proof in proved[:MOST_CELLS] if proof.label == kind):
            lessons.append(proof.lesson)
            again = lessons.count(proof.lesson)  # a second cell of a lesson
            name = proof.name if again == 1 else f"{proof.lesson} ({again})"
            cells.append(f"[{name}](#{target(proof)})")
        if cells:
            below.append(f"{words}: {', '.join(cells)}")
    below += [f"[{_plain(source.line)}]({source.url})" for source in card.sources]
    parts.append("\n".join(f"- {line}" for line in below))
    return "\n\n".join(part for part in parts if part)


def _index(proofs: Mapping[str, Sequence[Proof]]) -> str:
    """The topics that articles name, and the cells that teach them."""
    rows = ["## Topics · 主题索引", "", "| topic | 主题 | taught in |", "|---|---|---|"]
    for key, words in topics().items():
        cells = ", ".join(f"[{p.lesson}](#{target(p)})" for p in _one_a_lesson(proofs.get(key, ())))
        rows.append(f"| {_plain(words.en)} | {words.zh} | {cells} |")
    return "\n".join(rows) + "\n\n"


def _one_a_lesson(proved: Iterable[Proof]) -> list[Proof]:
    first: dict[str, Proof] = {}
    for proof in proved:
        first.setdefault(proof.lesson, proof)
    return [first[lesson] for lesson in sorted(first)]


def _toctree(names: Iterable[str]) -> str:
    return "```{toctree}\n:hidden:\n\n" + "\n".join(names) + "\n```\n"


def _plain(text: str) -> str:
    """A card's text as Markdown: its `code` stays, other signs stand for themselves."""
    parts = re.split(r"(`[^`]+`)", text)
    plain = "".join(
        part if part.startswith("`") else re.sub(r"([\\*<$|\[\]])", r"\\\1", part) for part in parts
    )
    return re.sub(r"^(\d+)\. ", r"\1\\. ", plain)  # steps in one paragraph, not a list of one
