"""Text to train on, and what distributes samples over ranks. In the order to read:

text           a corpus as tokens
sampler        which samples a rank sees: one shuffled order
token_budget   batches with equal numbers of tokens
uneven         ranks with different numbers of batches
work_queue     samples assigned one at a time
cached         samples computed once and kept in a folder
"""

from ddpz_lite.data.cached import Cached
from ddpz_lite.data.sampler import RankSampler
from ddpz_lite.data.text import Corpus, Windows, corpus
from ddpz_lite.data.token_budget import TokenBudgetSampler
from ddpz_lite.data.uneven import joined
from ddpz_lite.data.work_queue import WorkQueue, job_store

__all__ = [
    "Cached",
    "Corpus",
    "RankSampler",
    "TokenBudgetSampler",
    "Windows",
    "WorkQueue",
    "corpus",
    "job_store",
    "joined",
]
