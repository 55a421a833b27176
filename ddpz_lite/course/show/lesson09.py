"""The owners of a flat buffer's slices before and after the collectives of ZeRO-1."""

from __future__ import annotations

from ddpz_lite.course.show.canvas import figure, house_style
from ddpz_lite.course.show.page import show_figure
from ddpz_lite.course.show.style import SERIES, TEXT_COLOR


def owners(world: int) -> None:
    """Draw each rank's slices of one flat buffer before and after the two collectives.

    A row is a rank, a column a slice, in the colour of its owner. Pale: in memory, but not what the
    placement at the top speaks of, because it is this rank's own gradient or an old parameter.
    """
    from matplotlib.patches import Rectangle

    own, mean, old, new = "grad of\nrank {}", "mean\ngrad", "old", "new"
    panels = (
        ("backward", "gradient: P", own, own),
        ("reduce-scatter", "gradient: S", mean, own),
        ("update", "parameter: S", new, old),
        ("all-gather", "parameter: R", new, new),
    )
    fig, axes_of = figure(1, len(panels), height=2.5)
    rows = [["after", "rank", "up to date", "also in memory"]]
    with house_style():
        for axes, (moment, placement, in_own, in_others) in zip(axes_of, panels, strict=True):
            for rank in range(world):
                pale_parts = []
                for part in range(world):
                    text = in_own if rank == part else in_others
                    pale = text in (own, old)
                    pale_parts += [str(part)] * pale
                    look = SERIES[part % len(SERIES)]
                    alpha = 0.25 if pale else 1.0
                    box = Rectangle(
                        (part, rank), 0.94, 0.9, fc=look.color, ec="#B0B0A8", alpha=alpha
                    )
                    axes.add_patch(box)
                    color = TEXT_COLOR if pale else look.text_color
                    axes.text(part + 0.47, rank + 0.45, text.format(rank), ha="center",
                              va="center", fontsize=6.5, color=color)  # fmt: skip
                fresh = [str(part) for part in range(world) if str(part) not in pale_parts]
                rows.append([moment, str(rank), ", ".join(fresh), ", ".join(pale_parts)])
            axes.set(xlim=(-0.05, world), ylim=(world, -0.05))
            axes.set_title(f"after {moment}\n{placement}", fontsize=9)
            axes.set_xticks([part + 0.47 for part in range(world)], range(world), fontsize=8)
            axes.set_yticks([rank + 0.45 for rank in range(world)], range(world), fontsize=8)
            axes.tick_params(length=0)
            axes.spines[:].set_visible(False)
            axes.set_xlabel("slice", fontsize=8)
        axes_of[0].set_ylabel("rank", fontsize=8)
        fig.suptitle("A step of ZeRO-1: gradients, then parameters (a diagram)", fontsize=10)
    alt = (
        f"{world} ranks by {world} slices. After backward every rank has a gradient of its own in "
        "every slice. After the reduce-scatter rank r has the mean in slice r only, and updates "
        "it. Its other gradients and its old parameters are still in memory. After the "
        "all-gather every rank has every new slice."
    )
    show_figure(fig, alt=alt, table=rows)
