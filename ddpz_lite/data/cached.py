"""A data set that computes each sample once and keeps it in a folder.

Workers of a DataLoader are processes: what one keeps in memory no other sees, and it goes with the
worker. A folder on the machine's own disk is there for all workers of all its ranks, and for the
next epoch and the next run.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset


class Cached(Dataset):
    """`dataset` with a folder of samples: an item is computed by whoever asks first.

    Samples are tensors, numbers, strings, and tuples, lists and dicts of them. Cache what is the
    same each time, such as decoding or tokenising; augment afterwards, or each epoch sees the same
    noise. The folder must belong to this data set as it is now: another version takes another one.

    Two ranks may compute the same sample at the same moment. Both write a file of their own, and
    give it its name when it is whole, so nobody ever reads half of one.
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
