"""The pages "Questions" of the site: every card in English and Chinese, linked to its cells.

A page for each topic; their titles and the table of topics are on the first page. The links lead to
the very cell: `targets` puts a mark before each. Each card has a mark, too, its number: the search
page leads to the very card (see find.js).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from ddpz_lite.course.gym.bank import Card, Words, cards, topics
from ddpz_lite.course.gym.proofs import Proof

MOST_CELLS = 4  # that one answer is linked to
HEAD = """\
# Questions

What interviews ask about distributed training, and {myths} sentences that articles print and that
are wrong. Each answer is linked to a cell of a lesson that proves it. To learn them, run
`ddpz gym`: it asks what you are about to forget. {lesson}

分布式训练的面试题与常见误解，中英对照，每个回答都链接到能证明它的单元格。搜索框支持中文。

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
    first = HEAD.format(myths=myths, lesson=LESSON if there else "")
    for topic, ones in by_topic.items():
        myths = sum(card.myth for card in ones)
        first += (
            f"| [{topic.en}]({named[topic]}.md) | {topic.zh} | {len(ones) - myths} | {myths} |\n"
        )
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


def _page(topic: Words, ones: Sequence[Card], proofs: Mapping[str, Sequence[Proof]]) -> str:
    parts = [f"# {topic.en}" + (f" · {topic.zh}" if topic.zh != topic.en else "")]
    for kind, title in ((False, "Questions · 问题"), (True, "Myths · 误解")):
        there = [card for card in ones if card.myth == kind]
        if there:
            parts.append(f"## {title}")
        parts += [_card(card, proofs.get(card.id, ())) for card in there]
    return "\n\n".join(parts) + "\n"


def _card(card: Card, proved: Sequence[Proof]) -> str:
    quoted = "“{}”" if card.myth else "{}"
    parts = [
        f"({card.id})=\n### {card.id} · {quoted.format(_plain(card.front.en))}",
        _plain(card.back.en),
    ]
    front = card.front.zh if card.front.zh != card.front.en else ""
    parts += [f"**{quoted.format(_plain(front))}**"] if front else []
    parts.append(_plain(card.back.zh))
    below = []
    if proved:
        cells = []
        lessons: list[str] = []
        for proof in proved[:MOST_CELLS]:
            lessons.append(proof.lesson)
            again = lessons.count(proof.lesson)  # a second cell of a lesson
            words = proof.name if again == 1 else f"{proof.lesson} ({again})"
            cells.append(f"[{words}](#{target(proof)})")
        below.append(f"Proved by a run · 由运行证明: {', '.join(cells)}")
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
