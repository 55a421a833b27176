"""Real text to train on, and what feeds it to many ranks: samplers, a work queue, a cache."""

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
