"""Jobs of lesson 18: attention and loss of a sequence that is divided over ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable
from time import monotonic, sleep  # their own: an answer may patch the module's
from typing import Any

import torch

from ddpz_lite.course.check.watch import Holding, Kept
from ddpz_lite.wire import span

READ_EVERY = 0.004  # seconds between two looks at what is held, while attention takes its time
READS = 5


# ---- attention to some keys ----


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """(heads, queries, keys); with fewer heads of keys, several heads of queries share one."""
    k = k.repeat_interleave(len(q) // len(k), 0)
    return q @ k.transpose(-1, -2) * scale


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, log-sum-exp): (heads, queries, dim) and (heads, queries). Of no key: 0 and -inf."""
    scores = _scores(q, k, scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp()
    return weights @ v.repeat_interleave(len(q) // len(v), 0), lse


def _merged(
    first: tuple[torch.Tensor, torch.Tensor], second: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    lse = torch.logaddexp(first[1], second[1])
    safe = lse.nan_to_num(neginf=0.0)
    parts = (out * (own - safe).exp()[..., None] for out, own in (first, second))
    return sum(parts), lse


def _checked(q: Any, k: Any, v: Any) -> None:
    """Raises ValueError where attention of these is not defined."""
    forms = [tuple(t.shape) for t in (q, k, v)]
    heads = [form[0] for form in forms if len(form) == 3]
    fit = len(heads) == 3 and forms[1] == forms[2] and forms[0][2] == forms[1][2]
    if not fit or not heads[1] or heads[0] % heads[1]:
        raise ValueError(
            "attend takes q (heads, queries, dim), and k and v (kv_heads, keys, dim), where "
            f"kv_heads divides heads; it was given {', '.join(map(str, map(list, forms)))}"
        )


# ---- 18.merge ----


def merge(answer: Callable[..., Any], *, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """calls: the arguments of each, and whether they are "turned": views of another layout."""
    given = [{n: t for n, t in call.items() if n != "turned"} for call in calls]
    given = [
        {name: _turned(t) if call["turned"] else t for name, t in own.items()}
        for call, own in zip(calls, given, strict=True)
    ]
    kept = Kept(calls=given)
    results = [answer(**own) for own in given]
    return {"results": results, "changed": kept.changed()}


def _turned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with the last dimension outermost in memory."""
    return tensor.movedim(-1, 0).contiguous().movedim(0, -1)


# ---- 18.ring_attention ----


def ring_attention(answer: Callable[..., Any], *, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """calls: q, k, v, lengths and causal of each, and for what it is handed as attend the "scale"
    and how long it takes, "nap". Where it takes time, what the rank holds is counted.
    """
    kept = Kept(calls=calls)
    results = []
    for number, call in enumerate(calls):
        given = [call["q"], call["k"], call["v"]]
        holding = Holding(known=given) if call["nap"] else None
        log: list[dict[str, Any]] = []
        attend = _attending(call["scale"], call["nap"], holding, log)
        arguments = (attend, *given, call["lengths"], call["causal"])
        with span(f"call {number}"):
            if holding is None:
                out = answer(*arguments)
            else:
                with holding:
                    out = answer(*arguments)
        results.append({"out": out, "log": log})
    return {"results": results, "changed": kept.changed()}


def _attending(
    scale: float, nap: float, holding: Holding | None, log: list[dict[str, Any]]
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def attend(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None = None,
        so_far: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of q to these keys, added to that to the keys before: (out, lse)."""
        if holding is None:
            with span("attend"):
                return work(q, k, v, mask, so_far, None)
        with span("attend"), holding.paused():
            return work(q, k, v, mask, so_far, _least_held(holding, nap))

    def work(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        so_far: tuple[torch.Tensor, torch.Tensor] | None,
        held: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        _checked(q, k, v)
        form = [q.shape[1], k.shape[1]]
        if mask is not None and (mask.dtype != torch.bool or list(mask.shape) != form):
            raise ValueError(
                f"attend takes a bool mask of shape {form}, (queries, keys); it was given "
                f"{str(mask.dtype).removeprefix('torch.')} of shape {list(mask.shape)}"
            )
        log.append({"k": k.clone(), "held": held})
        now = _attention(q, k, v, mask, scale)
        return now if so_far is None else _merged(so_far, now)

    return attend


def _least_held(holding: Holding, nap: float) -> int:
    """Bytes that are held, while the nap lasts: the least of several looks, since threads of the
    backend free what was sent a moment after it was waited for.
    """
    began, seen = monotonic(), []
    gc.collect()
    for _ in range(READS):
        seen.append(holding._bytes())
        sleep(READ_EVERY)
    sleep(max(0.0, nap - (monotonic() - began)))
    return min(seen)


# ---- 18.ulysses ----


def ulysses(answer: Callable[..., Any], *, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """calls: q, k, v and lengths of each, and for what it is handed as attend "scale" and "causal".

    "turned": q, k and v are views. "refused": the answer should raise; what it raises is returned.
    """
    names = ("q", "k", "v")
    given = [
        {name: _turned(call[name]) if call["turned"] else call[name] for name in names}
        for call in calls
    ]
    kept = Kept(calls=given, lengths=[call["lengths"] for call in calls])
    results = []
    for number, (call, own) in enumerate(zip(calls, given, strict=True)):
        log: list[list[list[int]]] = []
        attend = _whole(call["scale"], call["causal"], log)
        out = raised = None
        with span(f"call {number}"):
            try:
                out = answer(attend, *own.values(), call["lengths"])
            except ValueError as error:
                if not call["refused"]:
                    raise
                raised = str(error)[:500]
        results.append({"out": out, "raised": raised, "log": log})
    return {"results": results, "changed": kept.changed()}


def _whole(scale: float, causal: bool, log: list[Any]) -> Callable[..., torch.Tensor]:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of a sequence whose tokens are all there: (heads, tokens, dim)."""
        _checked(q, k, v)
        if q.shape[1] != k.shape[1]:
            raise ValueError(
                f"attend takes as many keys as queries; it was given {k.shape[1]} and {q.shape[1]}"
            )
        log.append([list(q.shape), list(k.shape)])
        mask = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril() if causal else None
        out, _ = _attention(q, k, v, mask, scale)
        return out.transpose(0, 1).contiguous().transpose(0, 1)

    return attend


# ---- 18.shifted_loss ----


def shifted_loss(answer: Callable[..., Any], *, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """calls: logits and labels of each, whether the logits need a gradient, "grad", and the factor
    "times" of the loss in backward.
    """
    kept = Kept(calls=calls)
    results = []
    for number, call in enumerate(calls):
        logits = call["logits"].clone().requires_grad_(call["grad"])
        with span(f"call {number}"):
            loss = answer(logits, call["labels"])
        value = loss.detach().clone() if isinstance(loss, torch.Tensor) else loss
        gradient, early = None, logits.grad is not None
        if call["grad"] and isinstance(loss, torch.Tensor):
            with span(f"backward {number}"):
                (loss * call["times"]).backward()
            gradient = logits.grad
        same = torch.equal(logits.detach(), call["logits"]) and logits.requires_grad == call["grad"]
        results.append({"loss": value, "grad": gradient, "early": early, "same": same})
    return {"results": results, "changed": kept.changed()}


# ---- 18.zigzag ----


def zigzag(answer: Callable[..., Any], *, questions: list[dict[str, Any]]) -> dict[str, Any]:
    """questions: the keyword arguments of one call each."""
    return {"assigned": [answer(**question) for question in questions]}
