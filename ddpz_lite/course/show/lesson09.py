"""The owners of a flat buffer's slices before and after the collectives of ZeRO-1."""

from __future__ import annotations

from ddpz_lite.course.show.canvas import figure, house_style
from ddpz_lite.course.show.page import show_figure
from ddpz_lite.course.show.style import SERIES, TEXT_COLOR


def owners(world: int) -> None:
    """Draw each rank's slices of one flat buffer before and after the two collectives.

    A row is a rank, a column a slice, in the colour of its owner. Pale: a gradient of that rank
    alone.
    """
    from matplotlib.patches import Rectangle

    panels = (
        ("backward: P", lambda rank, part: f"grad of\nrank {rank}"),
        ("reduce-scatter: S", lambda rank, part: "mean\ngrad" if rank == part else ""),
        ("update: S", lambda rank, part: "new" if rank == part else ""),
        ("all-gather: R", lambda rank, part: "new"),
    )
    fig, axes_of = figure(1, len(panels), height=2.3)
    with house_style():
        for axes, (title, text_of) in zip(axes_of, panels, strict=True):
            for rank in range(world):
                for part in range(world):
                    text = text_of(rank, part)
                    look = SERIES[part % len(SERIES)]
                    alpha = 0.25 if text.startswith("grad") else 1.0
                    fill = look.color if text else "white"
                    box = Rectangle((part, rank), 0.94, 0.9, fc=fill, ec="#B0B0A8", alpha=alpha)
                    axes.add_patch(box)
                    color = TEXT_COLOR if alpha < 1 else look.text_color
                    axes.text(part + 0.47, rank + 0.45, text, ha="center", va="center",
                              fontsize=6.5, color=color)  # fmt: skip
            axes.set(xlim=(-0.05, world), ylim=(world, -0.05))
            axes.set_title(title, fontsize=9)
            axes.set_xticks([part + 0.47 for part in range(world)], range(world), fontsize=8)
            axes.set_yticks([rank + 0.45 for rank in range(world)], range(world), fontsize=8)
            axes.tick_params(length=0)
            axes.spines[:].set_visible(False)
            axes.set_xlabel("slice", fontsize=8)
        axes_of[0].set_ylabel("rank", fontsize=8)
        fig.suptitle("A step of ZeRO-1: gradients, then parameters (a diagram)", fontsize=10)
    alt = (
        f"{world} ranks by {world} slices. After backward every rank has a gradient of its own in "
    )
    alt += "every slice. After the reduce-scatter rank r has only slice r, the mean, and updates "
    alt += "it. After the all-gather every rank has every new slice."
    rows = [["moment", "rank", "slices held"]]
    for title, text_of in panels:
        for rank in range(world):
            held = [str(part) for part in range(world) if text_of(rank, part)]
            rows.append([title, str(rank), ", ".join(held)])
    show_figure(fig, alt=alt, table=rows)
