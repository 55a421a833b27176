"""A data set that computes each sample once and keeps it in a folder.

Workers of a DataLoader are processes: what one keeps in memory is invisible to the others, and lost
with it. A folder on the local disk serves all workers of all ranks of the machine, and later epochs
and runs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset


class Cached(Dataset):
    """`dataset` with a folder of samples: an item is computed when it is first requested.

    Samples are tensors, numbers, strings, and tuples, lists and dicts of them. Cache deterministic
    steps such as decoding or tokenising, and augment afterwards, or each epoch sees the same noise.
    Use a new folder for each version of the data set.

    Two ranks may compute the same sample at the same time. Both write a temporary file and rename
    it when it is complete, so no reader sees half of one.
    """

    def __init__(self, dataset: Any, folder: str | os.PathLike) -> None:
        self.dataset, self.folder = dataset, Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        file = self.folder / f"{index}.pt"
        try:
            return torch.load(file)
        except FileNotFoundError:
            sample = self.dataset[index]
        partial = self.folder / f"{index}.{os.getpid()}.part"
        torch.save(sample, partial)
        partial.replace(file)
        return sample
