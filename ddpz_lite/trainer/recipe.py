"""Everything that defines a training run, with defaults: the options of `ddpz train`.

It is separate from the loop and imports no torch, so that `ddpz train --help` answers at once. Each
option is defined once: name, default, and help text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

AUTO = "auto"
# The axes of --mesh; neighbours along the last one are neighbours in the world. Another axis is one
# more name here, and what `trainer.mesh` does along it.
AXES = ("data", "pipe", "expert", "context", "tensor")
UNNAMED = ("data", "pipe", "tensor")  # what --mesh 2x2x2 gives
METAVARS = {int: "N", float: "X", str: "PATH"}
UNPROFILED, PROFILED = 2, 3  # steps of --profile: the first to warm up, the next to record
MOST = 2**31 - 1  # of any integer option, so that sums and products of two fit 64 bits


def _option(
    section: str,
    default: Any,
    help: str,
    *,
    kind: Callable[[str], Any] | None = None,
    at_least: float | None = None,
    choices: Sequence[Any] | None = None,
    metavar: str | None = None,
) -> Any:
    """A field that is an option; `kind` parses it if the type of the default does not."""
    about = {"section": section, "help": help, "at_least": at_least, "choices": choices}
    about["kind"] = kind or (str if default is None else type(default))
    about["metavar"] = metavar or METAVARS.get(about["kind"])
    return field(default=default, metadata=about)


def steps_or_auto(text: str) -> int | str:
    """What --save-every takes: "50" or "auto"."""
    return text if text == AUTO else int(text)


@dataclass(frozen=True)
class Recipe:
    """A training run. Raises ValueError, naming the option, for an invalid value.

    A step is one update: `accumulate` micro-batches of `batch` windows on each rank (of a mesh: for
    each index along data and expert), each window `context` tokens (bytes) long. Paths are strings,
    so that the recipe is plain data.
    """

    text: str | None = _option(
        "text", None, "file or folder to learn from (default: the standard library's sources)"
    )
    context: int = _option("text", 128, "bytes in a window", at_least=1)
    sample: int = _option("text", 200, "bytes to write at the end; 0: none", at_least=0)

    layers: int = _option("model", 4, "blocks", at_least=1)
    heads: int = _option("model", 4, "attention heads in a block", at_least=1)
    width: int = _option("model", 128, "width of the model", at_least=1)
    dropout: float = _option("model", 0.0, "probability, from 0 up to but not 1", at_least=0)
    experts: int = _option(
        "model", 0, "experts in each block, in place of its MLP; 0: none", at_least=0
    )
    top_k: int = _option("model", 2, "experts that a token uses; none is dropped", at_least=1)
    balance: float = _option(
        "model",
        0.001,
        "step of the bias that moves tokens to experts with few, after each update; 0: none",
        at_least=0,
    )

    stage: int = _option("ranks", 0, "0 is DDP; 1, 2, 3 are ZeRO", choices=range(4))
    mesh: str | None = _option(
        "ranks",
        None,
        "ranks along data, pipe and tensor, or along named axes, as data=2,context=2. data: other "
        "windows; pipe: layers in stages, with --accumulate micro-batches; tensor: heads and MLP "
        "are cut; context: other tokens of the same windows; expert: other windows, and other "
        "experts. --stage goes along data, context and expert, and for experts along the first two",
        metavar="DxPxT|NAME=N,...",
    )
    schedule: str = _option(
        "ranks",
        "1f1b",
        "of a mesh with stages; interleaved: each rank has two chunks of the model",
        choices=("1f1b", "gpipe", "interleaved", "zb"),
    )
    shard_size: int = _option(
        "ranks",
        0,
        "adjacent ranks that share the shards; the others are replicas (HSDP); 0: all ranks",
        at_least=0,
    )
    survive: bool = _option(
        "ranks", False, "when a rank dies, the others continue without it; stage 0, on one machine"
    )
    precision: str = _option(
        "ranks",
        "fp32",
        "of forward and backward; fp16 has a dynamic loss scale",
        choices=("fp32", "bf16", "fp16"),
    )

    steps: int = _option("optimization", 200, "updates in all", at_least=1)
    batch: int = _option("optimization", 8, "windows in a micro-batch of one rank", at_least=1)
    accumulate: int = _option("optimization", 1, "micro-batches before an update", at_least=1)
    lr: float = _option("optimization", 1e-3, "highest learning rate", at_least=0)
    warmup: int = _option("optimization", 10, "steps until it is reached; then cosine", at_least=0)
    weight_decay: float = _option("optimization", 0.1, "of matrices, not of vectors", at_least=0)
    clip: float = _option("optimization", 1.0, "highest norm of the gradient; 0: any", at_least=0)
    seed: int = _option("optimization", 0, "of weights, order and dropout", at_least=0)

    checkpoint: str | None = _option("files", None, "folder for checkpoints; all ranks must see it")
    save_every: int | str = _option(
        "files",
        100,
        "steps between two checkpoints; auto: from the time of a save and --failure-hours",
        kind=steps_or_auto,
        metavar="N|auto",
        at_least=1,
    )
    failure_hours: float = _option(
        "files", 24.0, "hours between two failures of the run, for --save-every auto", at_least=0.01
    )
    save_in_background: bool = _option(
        "files", False, "train while a checkpoint is written, from a copy in the host's memory"
    )
    resume: bool = _option(
        "files", False, "continue from the newest good checkpoint, if there is one"
    )
    report: int = _option("files", 10, "steps between two lines of progress", at_least=1)
    validate: int = _option("files", 50, "steps between two validations; 0: none", at_least=0)
    tensorboard: str | None = _option("files", None, "folder for TensorBoard's scalars")
    profile: str | None = _option(
        "files", None, "folder for torch.profiler's view of steps 3 to 5, a file for each rank"
    )

    def __post_init__(self) -> None:
        for option in fields(self):
            value, about = getattr(self, option.name), option.metadata
            flag = flag_of(option.name)
            if value == AUTO and about["kind"] is steps_or_auto:
                continue
            if about["at_least"] is not None and not about["at_least"] <= value < float("inf"):
                raise ValueError(f"{flag} must be at least {about['at_least']}, got {value}")
            if about["kind"] in (int, steps_or_auto) and value > MOST:
                raise ValueError(f"{flag} must be at most {MOST}, got {value}")
            if about["choices"] and value not in about["choices"]:
                allowed = ", ".join(map(str, about["choices"]))
                raise ValueError(f"{flag} must be one of {allowed}, got {value!r}")
        if self.dropout >= 1:
            raise ValueError(f"--dropout must be below 1, got {self.dropout}")
        if self.width % self.heads:
            raise ValueError(f"--width {self.width} does not divide into --heads {self.heads}")
        if self.profile and self.steps <= UNPROFILED:
            raise ValueError(
                f"--profile begins after {UNPROFILED} steps, and --steps is {self.steps}"
            )
        self._check_mesh()
        self._check_experts()
        self._check_survive()
        if self.resume and self.checkpoint is None:
            raise ValueError("--resume needs --checkpoint DIR, the folder to resume from")
        if self.save_in_background and self.checkpoint is None:
            raise ValueError("--save-in-background needs --checkpoint DIR, the folder to save to")

    @property
    def axes(self) -> dict[str, int] | None:
        """Ranks by name of the axis, 1 for those that --mesh does not name; None without it."""
        if self.mesh is None:
            return None
        sizes = dict.fromkeys(AXES, 1)
        if re.fullmatch(r"([1-9]\d{0,3}x){2}[1-9]\d{0,3}", self.mesh):
            return sizes | dict(zip(UNNAMED, map(int, self.mesh.split("x")), strict=True))
        given = [part.partition("=") for part in self.mesh.split(",")]
        names = [name for name, _, _ in given]
        counts = all(re.fullmatch(r"[1-9]\d{0,3}", size) for _, _, size in given)
        if not counts or not set(names) <= set(AXES) or len(set(names)) < len(names):
            raise ValueError(
                "--mesh takes DxPxT, as 2x2x2 for 8 ranks, or names with a number each, as "
                f"data=2,context=2; not {self.mesh!r}. The names are {', '.join(AXES)}."
            )
        return sizes | {name: int(size) for name, _, size in given}

    @property
    def sharers(self) -> int:
        """Ranks that share each window, with some of its tokens on each."""
        return self.axes["context"] if self.axes else 1

    @property
    def chunks(self) -> int:
        """Parts of the model on each rank of a pipeline."""
        return 2 if self.schedule == "interleaved" else 1

    def _check_mesh(self) -> None:
        axes = self.axes or dict.fromkeys(AXES, 1)
        pipe, tensor = axes["pipe"], axes["tensor"]
        if pipe == 1 and self.schedule != "1f1b":
            raise ValueError(f"--schedule {self.schedule} is for stages. Fix: --mesh 1x2x1, say")
        if self.axes is None:
            return
        if self.shard_size:
            raise ValueError("--mesh and --shard-size are two meshes. Fix: give one of them")
        if (stages := pipe * self.chunks) > self.layers:
            raise ValueError(f"--mesh {self.mesh} has {stages} stages for --layers {self.layers}")
        if self.chunks > 1 and self.accumulate % pipe:
            raise ValueError(
                f"--schedule interleaved needs --accumulate {pipe} or a multiple of it, for the "
                f"{pipe} ranks of the pipeline, got {self.accumulate}"
            )
        if self.heads % tensor:
            raise ValueError(f"--mesh {self.mesh}: --heads {self.heads} do not divide by {tensor}")
        if tensor > 1 and self.dropout:
            raise ValueError(f"--mesh {self.mesh} cuts heads, and needs --dropout 0")
        self._check_context()

    def _check_context(self) -> None:
        if self.sharers == 1:
            return
        if self.dropout:
            raise ValueError(f"--mesh {self.mesh} cuts windows, and needs --dropout 0")
        if self.context % (chunks := 2 * self.sharers):
            raise ValueError(
                f"--mesh {self.mesh} cuts windows into {chunks} chunks, two for each rank along "
                f"context, and --context {self.context} does not divide by {chunks}"
            )

    def _check_experts(self) -> None:
        axes = self.axes or dict.fromkeys(AXES, 1)
        if self.experts and self.top_k > self.experts:
            raise ValueError(f"--top-k {self.top_k} is more than --experts {self.experts}")
        if axes["expert"] > 1 and (not self.experts or self.experts % axes["expert"]):
            raise ValueError(
                f"--mesh {self.mesh} has {axes['expert']} ranks along expert, and --experts "
                f"{self.experts} do not divide by it. Fix: --experts {4 * axes['expert']}, say"
            )
        if axes["tensor"] > 1 and self.experts:
            raise ValueError(
                f"--mesh {self.mesh} cuts MLPs, and --experts {self.experts} has none. Fix: the "
                "axis expert in place of tensor"
            )

    def _check_survive(self) -> None:
        if not self.survive:
            return
        if self.stage or self.shard_size or self.mesh:
            raise ValueError(
                "--survive needs the full state on every rank, and here it is sharded: the dead "
                "rank's shard would be lost. Fix: use --stage 0 alone; or --checkpoint DIR "
                "--resume, so that the remaining ranks start again from the last save"
            )
        if self.experts:
            raise ValueError(
                "--survive and --experts cannot be combined: the ranks that count the experts' "
                "tokens are not formed again after a death. Fix: give one of them"
            )
        if self.save_in_background:
            raise ValueError(
                "--survive and --save-in-background cannot be combined: the thread that writes has "
                "process groups that are not formed again after a death. Fix: give one of them"
            )


def flag_of(name: str) -> str:
    """How an option is written: weight_decay is --weight-decay."""
    return "--" + name.replace("_", "-")
