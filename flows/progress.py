"""How far a step or an evaluation is, as a bar in the Prefect UI."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self, cast
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact

from cells.board import Board
from flows.step_page import artifact_key
from storage.records import QueryPlan
from storage.run import Run

EVERY_S = 10.0
"""A change costs the server tens of milliseconds."""
_END_LIMIT_S = 30.0


class ProgressBar:
    """An artifact of the flow run around it, kept up by a thread for as long as the block lasts.

    Whatever fails here costs a picture, and nothing else.

    Args:
        key: small letters, digits, dashes; bars of one key are versions of one artifact.
        look: how far it is, from 0 to 1, and in words.
    """

    def __init__(self, key: str, look: Callable[[], tuple[float, str]]) -> None:
        self._key = key
        self._look = look
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep_up, name="progress", daemon=True)
        self._artifact: UUID | None = None
        self._shown = (-1.0, "")

    def __enter__(self) -> Self:
        try:
            share, words = self._look()
            self._artifact = cast(  # a coroutine only inside an event loop
                UUID, create_progress_artifact(100 * share, self._key, words)
            )
        except Exception:  # noqa: BLE001
            return self
        self._shown = (share, words)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._over.set()
        # What is cancelled has other things to end, and a request may take its time.
        if kind is None and self._artifact is not None:
            self._thread.join(_END_LIMIT_S)
            self._show()

    def _keep_up(self) -> None:
        while not self._over.wait(EVERY_S):
            self._show()

    def _show(self) -> None:
        try:
            now = self._look()
            if now != self._shown and self._artifact is not None:
                update_progress_artifact(self._artifact, 100 * now[0], now[1])
        except Exception:  # noqa: BLE001
            return  # with the next change
        self._shown = now


def step_bar(run: Run, step: int, queries: tuple[QueryPlan, ...], board: Board) -> ProgressBar:
    """Of a step: half of it its executions, half its updates."""
    executions = sum(query.group_size for query in queries)
    updates = run.config.training.updates_per_step

    def look() -> tuple[float, str]:
        ended = max(executions - board.live, 0)  # a batch ahead lives beside the step's own
        trained = sum(run.store.exists(run.layout.update(step, at)) for at in range(updates))
        words = f"{ended} of {executions} executions ended, {trained} of {updates} updates trained"
        share = (ended / max(executions, 1) + trained / updates) / 2
        return share, f"step {step + 1} of {run.config.training.steps}: {words}"

    return ProgressBar(f"progress-{artifact_key(run.run_id)}", look)


def evaluation_bar(
    run: Run, version: int, queries: tuple[QueryPlan, ...], board: Board
) -> ProgressBar:
    """Of an evaluation: its executions."""
    executions = sum(query.group_size for query in queries)

    def look() -> tuple[float, str]:
        ended = executions - board.live
        words = f"{ended} of {executions} executions ended"
        return ended / max(executions, 1), f"evaluation of version {version}: {words}"

    return ProgressBar(f"progress-{artifact_key(run.run_id)}", look)
