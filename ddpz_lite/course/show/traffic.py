"""A picture of what each rank sent, drawn from the run's own records."""

from __future__ import annotations

from typing import Any

from ddpz_lite.course.show.canvas import figure, house_style, stacked_bars
from ddpz_lite.course.show.page import show_figure
from ddpz_lite.course.show.style import bytes_unit, in_bytes


def traffic(run: Any, *, title: str = "Bytes sent, by operation") -> None:
    """Draw the bytes that each rank sent, stacked by operation. run: what `dz.launch` returned."""
    sent: dict[int, dict[str, int]] = run.bytes_sent()
    ops = list(dict.fromkeys(op for by_op in sent.values() for op in by_op))
    if not any(sum(by_op.values()) for by_op in sent.values()):
        raise ValueError(
            "show.traffic: this run sent nothing that was recorded. Launch with record=True and "
            "call a collective."
        )
    ranks = sorted(sent)
    totals = {rank: sum(sent[rank].values()) for rank in ranks}
    unit, unit_name = bytes_unit(max(totals.values()))
    fig, axes = figure(height=min(1.4 + 0.45 * len(ranks), 14))
    with house_style():
        axes.set_title(title)
        labels = [f"rank {rank}" for rank in ranks]
        drawn = [op for op in ops if any(by_op.get(op) for by_op in sent.values())]
        stacked_bars(axes, labels, [sent[rank] for rank in ranks], drawn, (unit, unit_name))
        axes.set_xlabel(f"{unit_name} sent")
    table = [["rank", *(f"{op}, bytes" for op in ops), "all, bytes"]]
    table += [[rank, *(sent[rank].get(op, 0) for op in ops), totals[rank]] for rank in ranks]
    least, most = min(totals.values()), max(totals.values())
    low, high = in_bytes(least), in_bytes(most)
    spread = f"{low} each" if low == high else f"between {low} and {high}"
    parts = ", ".join(
        f"{op} {in_bytes(sum(by_op.get(op, 0) for by_op in sent.values()))}" for op in ops
    )
    show_figure(fig, alt=f"{len(ranks)} ranks sent {spread}. Over all ranks: {parts}.", table=table)
