"""What the scheduler weighs, as measured: room of cells, live tokens, times of moves and work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

from cells.scheduler import Role, Timings
from configs.cells import CellsConfig

_SMOOTHING = 0.5
"""Weight of the newest measurement in the running means of switch times."""
_FIRST_SWITCH_S = 1.0
_FIRST_MICRO_STEP_S = 1.0


class Figures:
    """Running figures of one manager.

    Args:
        context: longest context of an execution, tokens. What an execution takes of a cell's KV
            cache counts as this until the first call has told something better.
        moves: role and seconds of earlier moves, oldest first.
    """

    def __init__(
        self, config: CellsConfig, context: int, moves: Iterable[tuple[Role, float]]
    ) -> None:
        self._fixed = config.executions_per_cell
        self._kv_tokens = config.kv_tokens
        self._context = context
        self._timings = Timings(_FIRST_SWITCH_S, _FIRST_SWITCH_S, 0.0, _FIRST_MICRO_STEP_S)
        self._pace: dict[str, Mapping[str, float | None]] = {}
        self._token_capacity: dict[str, int] = {}
        self._mean_tokens: float | None = None
        for to, seconds in moves:
            self.moved(to, seconds)

    def moved(self, to: Role, seconds: float) -> None:
        """A move to ``to`` took so long."""
        field = "to_training_s" if to is Role.TRAINING else "to_rollout_s"
        mean = _SMOOTHING * seconds + (1 - _SMOOTHING) * getattr(self._timings, field)
        self._timings = replace(self._timings, **{field: mean})

    def saw_cell(self, name: str, status: Mapping[str, Any]) -> None:
        """What a cell host says of itself."""
        self._pace[name] = status.get("pace", {})
        self._token_capacity[name] = status["engine"].get("token_capacity") or self._kv_tokens

    def saw_gateway(self, state: Mapping[str, Any]) -> None:
        """Where executions are, and how long their contexts have become."""
        cells = state["cells"].values()
        live = sum(cell["live"] for cell in cells)
        tokens = sum(cell.get("tokens", 0) for cell in cells)
        if live and tokens:
            self._mean_tokens = tokens / live

    @property
    def execution_tokens(self) -> float:
        """KV tokens of an execution: the mean of those that hold a place."""
        return float(self._context) if self._mean_tokens is None else self._mean_tokens

    @property
    def timings(self) -> Timings:
        """Means over the cells, of what each has measured."""
        means = {}
        for field in ("micro_step_s", "pull_s"):
            known = [pace[field] for pace in self._pace.values() if pace.get(field) is not None]
            if known:
                means[field] = fmean(seconds for seconds in known if seconds is not None)
        return replace(self._timings, **means)

    def token_capacity(self, name: str) -> int:
        """KV tokens that a cell's engine holds."""
        return self._token_capacity.get(name, self._kv_tokens)

    def capacity(self, name: str) -> int:
        """Executions that a cell serves at once: the setting, or what its KV cache has room for."""
        if self._fixed is not None:
            return self._fixed
        return max(1, int(self.token_capacity(name) / max(1.0, self.execution_tokens)))
