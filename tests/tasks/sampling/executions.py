"""Random executions for the tests, and what a plain, quadratic reading makes of them."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from configs.training import WithinKind
from storage.records import Call, CallKind, CallStatus, VersionSpan
from tasks.sampling.selection import RANK

Owner = tuple[str, int] | None


def call(
    number: int,
    parent: Call | None = None,
    *,
    kept: int = 0,
    new: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
    kind: CallKind = CallKind.MAIN,
    status: CallStatus = CallStatus.COMPLETE,
    version: int = 0,
    execution: str = "s00000-q0000-e000",
) -> Call:
    """A call whose log-probabilities tell every sampled token of an execution apart."""
    half = len(output) // 2
    spans = (VersionSpan(version=version, start=0, end=half),) if half else ()
    if len(output) > half:
        spans += (VersionSpan(version=version + 1, start=half, end=len(output)),)
    return Call(
        call_id=f"c{number:03d}",
        execution_id=execution,
        index=number,
        parent=None if parent is None else parent.call_id,
        kept=kept,
        new_ids=new,
        output_ids=output,
        output_logprobs=tuple(mark(number, offset) for offset in range(len(output))),
        spans=spans,
        kind=kind,
        kind_reason="test",
        agent="main",
        status=status,
        finish_reason="stop",
        fork_reason=None,
        started_at=float(number),
        waited_s=0.0,
        seconds=0.1,
        cell="a",
        cached_tokens=0,
    )


def mark(number: int, offset: int) -> float:
    """Log-probability of a sampled token; exact in 32 bits."""
    return -(number * 64 + offset + 1) / 1024


@dataclass(frozen=True)
class Token:
    """An id and the sampled token that it is, if it is one."""

    id: int
    owner: Owner


class Reading:
    """Every call's whole history, written out."""

    def __init__(self, calls: list[Call]) -> None:
        self.calls = {one.call_id: one for one in calls}
        self.histories: dict[str, tuple[Token, ...]] = {}
        self.prompts: dict[str, tuple[Token, ...]] = {}
        for one in calls:
            before = () if one.parent is None else self.histories[one.parent][: one.kept]
            prompt = before + tuple(Token(token, None) for token in one.new_ids)
            output = tuple(
                Token(token, (one.call_id, offset)) for offset, token in enumerate(one.output_ids)
            )
            self.prompts[one.call_id] = prompt
            self.histories[one.call_id] = prompt + output

    def trained(self, context: int) -> set[str]:
        return {
            name
            for name, one in self.calls.items()
            if one.status is CallStatus.COMPLETE
            and one.kind in RANK
            and one.output_ids
            and len(self.histories[name]) <= context
        }

    def selected(
        self, cap: int | None, within: WithinKind, context: int
    ) -> list[tuple[str, set[Owner]]]:
        """Last call and own targets of each trajectory, in order."""
        trained = self.trained(context)
        owned = {
            name: {t.owner for t in self.histories[name] if t.owner and t.owner[0] in trained}
            for name in trained
        }
        tips = [
            name
            for name in trained
            if not any(
                (name, len(self.calls[name].output_ids) - 1) in owned[other]
                for other in trained - {name}
            )
        ]
        chosen: list[tuple[str, set[Owner]]] = []
        taken: set[Owner] = set()
        for kind in RANK:
            left = [name for name in tips if self.calls[name].kind is kind]
            while left and (cap is None or len(chosen) < cap):
                if within is WithinKind.LATEST:
                    best = max(left, key=lambda name: self.calls[name].index)
                else:
                    best = max(
                        left, key=lambda name: (len(owned[name] - taken), self.calls[name].index)
                    )
                left.remove(best)
                chosen.append((best, owned[best] - taken))
                taken |= owned[best]
        return chosen


@st.composite
def executions(draw: st.DrawFn, most: int = 12) -> list[Call]:
    """Calls with continuations, forks anywhere, retries, several roots and all kinds."""
    calls: list[Call] = []
    lengths: dict[str, int] = {}
    ids = st.integers(0, 2)  # few ids, so that different calls share context by chance
    for number in range(draw(st.integers(0, most))):
        parent = draw(st.sampled_from(calls)) if calls and draw(st.integers(0, 4)) else None
        full = 0 if parent is None else lengths[parent.call_id]
        kept = full if draw(st.integers(0, 2)) else draw(st.integers(0, full))
        new = tuple(draw(st.lists(ids, min_size=0 if kept else 1, max_size=5)))
        output = tuple(draw(st.lists(ids, max_size=5)))
        one = call(
            number,
            parent,
            kept=kept,
            new=new,
            output=output,
            kind=draw(st.sampled_from([*RANK, CallKind.MAIN, CallKind.BACKGROUND])),
            status=draw(
                st.sampled_from([CallStatus.COMPLETE, CallStatus.COMPLETE, CallStatus.ABANDONED])
            ),
            version=draw(st.integers(0, 3)),
        )
        calls.append(one)
        lengths[one.call_id] = kept + len(new) + len(output)
    return calls
