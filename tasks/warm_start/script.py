"""The scripted agent: what it says at each call of the harness."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tasks.problems.specrepo.specification import Function, SpecFile, Specification
from tasks.warm_start.mistakes import written


@dataclass(frozen=True)
class Habits:
    """How far the scripted agent is from perfect, as shares of its executions or chances."""

    error_share: float = 1.0
    """Scale of the mistakes in functions."""
    gives_up: float = 0.25
    """Executions that stop before everything is written."""
    delegates: float = 0.2
    """Executions that hand parts to sub-agents."""
    runs: float = 0.3
    """Executions that run what they wrote before they say that they are done."""


CLEAN = Habits(error_share=0.0, gives_up=0.0, delegates=0.0)
"""For the first lessons: everything right, nothing handed on."""


def imperfect(error_share: float, delegate_share: float = Habits.delegates) -> Habits:
    """The usual habits with the mistakes scaled (0 leaves none), handing on as often as given."""
    usual = Habits()
    return replace(
        usual,
        error_share=usual.error_share * error_share,
        gives_up=usual.gives_up * error_share,
        delegates=delegate_share,
    )


_PIECE_SIZES = (1, 1, 2, 9)
_SUB_AGENT_PIECE = 2
_DELEGATED_SHARE = 0.7
ALL_WRITTEN = "all written"


class ScriptedAgent:
    """Works on one specification.

    Args:
        sub_agents: most parts that it hands on, as the harness allows them.
    """

    def __init__(
        self,
        specification: Specification,
        rng: random.Random,
        habits: Habits,
        sub_agents: int = 2,
    ) -> None:
        self._rng = rng
        self._habits = habits
        total = len(specification.functions)
        gives_up = total > 1 and rng.random() < habits.gives_up
        self._keep = rng.randint(1, total - 1) if gives_up else total
        self._left = [(file, list(file.functions)) for file in specification.files]
        self._size = rng.choice(_PIECE_SIZES)
        self._helpers = sub_agents if rng.random() < habits.delegates else 0
        self._to_run = [file.path for file in specification.files]
        if rng.random() >= habits.runs:
            self._to_run.clear()
        self._started: set[str] = set()
        self._handed_on: tuple[SpecFile, list[Function]] | None = None

    def turn(self, agent: str) -> str:
        """What it says at a turn of ``agent`` (``main`` or a sub-agent)."""
        return self._main_turn() if agent == "main" else self._sub_agent_turn()

    def summary(self, agent: str) -> str:
        """What it says when its context is full: the specification of what is left."""
        if agent != "main" and self._handed_on is not None:
            file, functions = self._handed_on
            return _left_text([(file, functions)])
        return _left_text(self._left)

    def _main_turn(self) -> str:
        if self._keep and self._left:
            file, functions = self._left[0]
            count = min(self._size, self._keep, len(functions))
            piece, self._left[0] = functions[:count], (file, functions[count:])
            if not self._left[0][1] and len(self._left) > 1:
                del self._left[0]
            self._keep -= count
            if self._started and self._helpers and self._rng.random() < _DELEGATED_SHARE:
                self._helpers -= 1
                self._handed_on = (file, list(piece))
                return tool_call("task", prompt=file.text(tuple(piece)))
            return self._writes(file, piece)
        if self._to_run:
            return tool_call("run", path=self._to_run.pop(0))
        return tool_call("done")

    def _sub_agent_turn(self) -> str:
        if self._handed_on is None or not self._handed_on[1]:
            return tool_call("done")
        file, functions = self._handed_on
        piece = functions[:_SUB_AGENT_PIECE]
        del functions[:_SUB_AGENT_PIECE]
        return self._writes(file, piece, name="append")

    def _writes(self, file: SpecFile, functions: Sequence[Function], name: str = "") -> str:
        name = name or ("append" if file.path in self._started else "write")
        self._started.add(file.path)
        content = "".join(
            written(function, self._rng, self._habits.error_share) for function in functions
        )
        return tool_call(name, path=file.path, content=content)


def _left_text(left: Sequence[tuple[SpecFile, Sequence[Function]]]) -> str:
    """Specification of what is still to write; the last file stays named when nothing is."""
    parts = [file.text(tuple(functions)) for file, functions in left if functions]
    return "\n".join(parts) or f"file: {left[-1][0].path}\n{ALL_WRITTEN}"


def tool_call(name: str, **arguments: str) -> str:
    """A tool call in the text form of Qwen3."""
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"
