"""Why jobs stop, how often, and what becomes of their time: published and modelled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ddpz_lite.course.fleet.events import Fleet, Report, simulate
from ddpz_lite.course.show.canvas import figure, house_style, legend_above, swatch
from ddpz_lite.course.show.page import Table, show_figure
from ddpz_lite.course.show.sliders import explore, options
from ddpz_lite.course.show.style import SERIES, style_of

# Unexpected interruptions of Llama 3 (Grattafiori et al. 2024, table 5), small ones added up.
CAUSES = {
    "GPU": 148,
    "GPU memory": 72,
    "GPU, other parts": 42,
    "software": 54,
    "network": 35,
    "host maintenance": 32,
    "host": 21,
    "silent corruption": 6,
    "other": 9,
}
# Published times between failures: GPUs, hours. OPT: 90 restarts in 56 days, from its logbook.
POINTS = {
    "Llama 3, counted": (16_384, 54 * 24 / 419),
    "OPT-175B, counted": (992, 56 * 24 / 90),
    "Kokolis et al., counted": (1024, 7.9),
    "Kokolis et al., projected": (16_384, 1.8),
}
PARTS = ("saves", "repeated work", "detection", "waiting for nodes", "restart", "missing groups")


def shares(report: Report) -> dict[str, float]:
    """The share of the time that was lost, by the parts of the figures."""
    found = dict.fromkeys(PARTS, 0.0)
    merged = {"waiting": "waiting for nodes", "regroup": "restart"}
    for cause, seconds in report.lost.items():
        part = "repeated work" if cause.startswith("repeated") else merged.get(cause, cause)
        found[part] += seconds / report.wall
    return found


def interruptions(gpu: float) -> None:
    """Show why jobs stop, and how the time between failures falls with the number of GPUs.

    gpu: mean time between failures of one GPU in hours, for the line.
    """
    total = sum(CAUSES.values())
    fig, (left, right) = figure(1, 2, height=3.3, width_ratios=(1, 1.15))
    with house_style():
        for place, count in enumerate(CAUSES.values()):
            left.barh(place, count, **SERIES[0].patch_kwargs)
            left.annotate(f"{count / total:.0%}", (count, place), xytext=(4, 0), va="center",
                          textcoords="offset points", fontsize=8.5)  # fmt: skip
        left.set_yticks(range(len(CAUSES)), list(CAUSES), fontsize=8.5)
        left.set_ylim(len(CAUSES) - 0.5, -0.5)
        left.set_xlim(0, 1.2 * max(CAUSES.values()))
        left.tick_params(axis="y", length=0)
        left.set(xlabel="interruptions of Llama 3 (published)")
        left.set_title(f"why it stopped, {total} times", fontsize=9.5)
        ends = [500, 200_000]
        right.loglog(ends, [gpu / n for n in ends], color=SERIES[0].color, marker="",
                     label="Llama 3's rate (derived)")  # fmt: skip
        for look, (name, (gpus, hours)) in zip(SERIES[1:], POINTS.items(), strict=False):
            right.loglog([gpus], [hours], linestyle="", label=name, color=look.color,
                         marker=look.marker, markersize=7)  # fmt: skip
        right.set_xticks([1000, 10_000, 100_000], ["1,000", "10,000", "100,000"])
        right.set_yticks([0.1, 1, 10, 100], ["6 min", "1 h", "10 h", "100 h"])
        right.minorticks_off()
        right.set(xlabel="GPUs of the job", ylim=(0.1, 900))
        right.grid()
        right.legend(fontsize=7.5, loc="upper right", frameon=True)
        right.set_title("time between failures (published)", fontsize=9.5)
    rows: Table = [["", "published"]]
    rows += [[cause, f"{count} interruptions"] for cause, count in CAUSES.items()]
    rows += [[f"{name}, {gpus:,} GPUs", f"{hours:.1f} h between failures"]
             for name, (gpus, hours) in POINTS.items()]  # fmt: skip
    alt = (
        "Causes of interruptions: "
        + ", ".join(f"{name} {count / total:.0%}" for name, count in CAUSES.items())
        + ". Time between failures against the number of GPUs, both axes logarithmic: a falling "
        "line, and published points: "
        + ", ".join(f"{name} {hours:.1f} h" for name, (_, hours) in POINTS.items())
        + "."
    )
    show_figure(fig, alt=alt, table=rows)


def time_lost(panels: Mapping[str, Mapping[str, Report]], *, title: str) -> None:
    """Show a bar for each report: the share of the time that was lost, by cause."""
    fig, alt, table = time_lost_figure(panels, title=title)
    show_figure(fig, alt=alt, table=table)


def time_lost_figure(
    panels: Mapping[str, Mapping[str, Report]], *, title: str
) -> tuple[Any, str, Table]:
    """The same as (figure, alt, table), a panel of bars below the other for each of `panels`."""
    found = {
        head: {name: shares(report) for name, report in reports.items()}
        for head, reports in panels.items()
    }
    every = [one for bars in found.values() for one in bars.values()]
    used = [part for part in PARTS if any(one[part] > 0.0005 for one in every)] or [PARTS[0]]
    heights = [len(bars) for bars in found.values()]
    fig, axes = figure(len(found), 1, height=1.3 + 0.34 * sum(heights) + 0.35 * len(found),
                       squeeze=False, height_ratios=heights, sharex=True)  # fmt: skip
    table: Table = [["", "", "goodput", *used]]
    with house_style():
        for row, (head, bars) in enumerate(found.items()):
            panel = axes[row, 0]
            for place, one in enumerate(bars.values()):
                left = 0.0
                for part in used:
                    look = style_of(part, used).patch_kwargs
                    panel.barh(place, 100 * one[part], left=left, height=0.66, **look)
                    left += 100 * one[part]
                panel.annotate(f"{left:.1f}%", (left, place), xytext=(4, 0), va="center",
                               textcoords="offset points", fontsize=9)  # fmt: skip
            panel.set_yticks(range(len(bars)), list(bars))
            panel.set_ylim(len(bars) - 0.5, -0.5)
            panel.tick_params(axis="y", length=0)
            panel.grid(axis="x")
            panel.set_title(head, fontsize=9.5, pad=4)
            if row == 0:
                legend_above(panel, [swatch(style_of(part, used)) for part in used], used, 3)
            for name, one in bars.items():
                goodput = 1 - sum(one.values())
                table.append([head, name, f"{goodput:.1%}", *(f"{one[p]:.1%}" for p in used)])
        panel.set_xlabel("share of the time that is lost, %")
        limit = max(sum(one.values()) for one in every)
        panel.set_xlim(0, max(118 * limit, 1))
        fig.suptitle(title, fontsize=11)
    alt = f"{title}. Lost: " + "; ".join(
        f"{row[0]}, {row[1]}: goodput {row[2]}, "
        + ", ".join(f"{part} {value}" for part, value in zip(used, row[3:], strict=True))
        for row in table[1:]
    )
    return fig, f"{alt}.", table


def fleet_explorer(job_of: Callable[..., Fleet]) -> None:
    """The widget: a job of your choice through 60 days.

    job_of: the GPUs, then by name cost and detect in seconds, restart in minutes, memory, and
    spares as a share of the nodes.
    """

    def picture(
        gpus: int, cost: float, detect: float, restart: float, memory: str, spares: float
    ) -> tuple[Any, str, Table]:
        setting = {"cost": cost, "detect": detect, "restart": restart, "spares": spares / 100}
        report = simulate(job_of(gpus, memory=memory == "yes", **setting), 60)
        head = f"{report.failures.total():,} failures in 60 days"
        return time_lost_figure(
            {head: {f"goodput {report.goodput:.1%}": report}},
            title=f"{gpus:,} GPUs (modelled)",
        )

    explore(
        picture,
        gpus=options("GPUs", [1024, 4096, 16_384, 100_000], default=16_384),
        cost=options("A save to the store takes", [5, 20, 60, 300], default=60, unit="seconds"),
        detect=options("Detection takes", [5, 60, 600, 1800], default=600, unit="seconds"),
        restart=options("A restart takes", [1, 3, 10, 60], default=10, unit="minutes"),
        memory=options("Saves in a neighbour's memory", ["no", "yes"], default="no"),
        spares=options("Spare nodes", [0, 0.5, 1, 2, 5], default=2, unit="%"),
    )
