"""What the manager, the training and the flow of one step tell each other, inside one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cells.progress import Progress
from cells.scheduler import Pace, Pacing, Role, TrainingWork

_NAMED = 4
"""Executions that a hang is told with; the others are counted."""


@dataclass(frozen=True)
class CellState:
    """A cell as the manager last saw it. ``since`` is on the monotonic clock."""

    name: str
    role: Role
    target: Role | None
    since: float
    is_core: bool
    engine_version: int | None
    replica_version: int | None
    detail: str = ""


@dataclass(frozen=True)
class Outlook:
    """The pace of launches, and what follows from it for the cells.

    ``oldest`` is the lowest version under which a group that still runs was launched; None where
    none does. ``coming`` are executions that the update under way will let be launched, ``last``
    says that there are none left.
    """

    pacing: Pacing
    oldest: int | None = None
    coming: int = 0
    last: bool = False


class Board:
    """Shared state with one lock; waiters are woken at each change.

    Args:
        live: ids of the step's executions that have not ended yet.
        serve_version: weight version that the step's executions are served with.
        expected: micro-steps to expect before the training has said how many there are.
        newer: what lives may be served with newer weights: they are served at once.
    """

    def __init__(
        self,
        *,
        live: Iterable[str],
        serve_version: int,
        expected: int = 0,
        newer: bool = False,
    ) -> None:
        self.newer = newer
        self._serve_version = serve_version
        self._version = serve_version
        self._updates = 0
        self._outlook: Outlook | None = None
        self._released = False
        self._served_s = 0.0
        self._seen_at = time.monotonic()
        self._next_version: int | None = None
        self._changed = threading.Condition()
        self.progress = Progress()
        """What moved last, and who waits for what."""
        self._live = set(live)
        self._work = TrainingWork(expected=expected)
        self._began = time.monotonic()
        self._rollout_s = 0.0
        self._cells: dict[str, CellState] = {}
        self._switch_s = 0.0
        self._switching_since: float | None = None
        self._held: frozenset[str] = frozenset()
        self._reports = 0
        self._asked = 0
        self._settled = -1
        self._error: BaseException | None = None
        self._stopped = False
        self._tell_live()

    @property
    def serve_version(self) -> int:
        """Weight version that rollout cells serve."""
        with self._changed:
            return self._serve_version

    def serve(self, version: int) -> None:
        """Cells serve ``version`` from when no execution lives that needs the one before."""
        with self._changed:
            if self._live and not self.newer:
                self._next_version = version
            else:
                self._serve_version = version
            self._note()

    def launch(self, executions: Iterable[str], version: int) -> None:
        """Further executions live from now on, served with ``version``.

        Raises:
            ValueError: some that live need another version.
        """
        with self._changed:
            if self._live and version != self._serve_version and not self.newer:
                raise ValueError(
                    f"{len(self._live)} executions still need version {self._serve_version}"
                )
            self._serve_version = version
            self._live.update(executions)
            self._tell_live()
            self._note()

    def await_serve_version(self, version: int, limit_s: float) -> bool:
        """Until ``version`` may be served; whether it may, within ``limit_s``."""
        with self._changed:

            def reached() -> bool:
                over = self._stopped or self._error is not None
                return self._serve_version >= version or over

            return self._changed.wait_for(reached, limit_s) and self._serve_version >= version

    def updated(self, version: int) -> None:
        """An update was trained; the weights are of ``version`` now."""
        with self._changed:
            self._version = version
            self._updates += 1
            self._note()

    @property
    def updates(self) -> int:
        """How many were trained since the board was made."""
        with self._changed:
            return self._updates

    def set_outlook(self, outlook: Outlook) -> None:
        with self._changed:
            if outlook != self._outlook:
                self._outlook = outlook
                self._note()

    @property
    def outlook(self) -> Outlook | None:
        """None where groups do not outlive their step."""
        with self._changed:
            return self._outlook

    @property
    def pace(self) -> Pace:
        with self._changed:
            return Pace.BURST if self._outlook is None else self._outlook.pacing.pace

    @property
    def oldest(self) -> int:
        """By how many updates the oldest group that still runs is behind."""
        with self._changed:
            if self._outlook is None or self._outlook.oldest is None:
                return 0
            return max(0, self._version - self._outlook.oldest)

    def release(self) -> None:
        """The step is trained: who waits for executions that outlive it waits no longer."""
        with self._changed:
            self._released = True
            self._changed.notify_all()

    @property
    def released(self) -> bool:
        with self._changed:
            return self._released

    @property
    def served_s(self) -> float:
        """Seconds that cells have served since the board was made, all together."""
        with self._changed:
            self._count_served()
            return self._served_s

    @property
    def live(self) -> int:
        """How many executions have not ended yet."""
        with self._changed:
            return len(self._live)

    @property
    def work(self) -> TrainingWork:
        with self._changed:
            return self._work

    @property
    def rollout_s(self) -> float:
        """Seconds from the board's making to the end of the last execution, or to now."""
        with self._changed:
            return time.monotonic() - self._began if self._live else self._rollout_s

    @property
    def switch_s(self) -> float:
        """Seconds during which at least one cell was switching."""
        with self._changed:
            since = self._switching_since
            return self._switch_s + (0.0 if since is None else time.monotonic() - since)

    @property
    def stopped(self) -> bool:
        """Whether the step is over, cancelled or can't go on."""
        with self._changed:
            return self._stopped or self._error is not None

    def cells(self) -> tuple[CellState, ...]:
        with self._changed:
            return tuple(self._cells.values())

    def trainers(self) -> tuple[str, ...]:
        """Names of the cells whose replica may train now, the core first."""
        cells = [cell for cell in self.cells() if cell.role is Role.TRAINING]
        return tuple(cell.name for cell in sorted(cells, key=lambda c: (not c.is_core, c.name)))

    def execution_ended(self, execution: str) -> None:
        """Told of one that did not live, or told again, nothing changes."""
        with self._changed:
            if execution not in self._live:
                return
            self._live.remove(execution)
            self.progress.did("rollout", f"{execution} ended")
            self._tell_live()
            # Between, the manager's own interval does: a decision for each of hundreds of
            # executions would only ask every daemon for its state again.
            if not self._live:
                self._rollout_s = time.monotonic() - self._began
                if self._next_version is not None:
                    self._serve_version, self._next_version = self._next_version, None
                self._note()

    def set_work(self, work: TrainingWork) -> None:
        with self._changed:
            if work != self._work:
                self.progress.did("training", f"{work.expected} micro-steps are left")
            self._work = work
            self._note()

    @property
    def asked(self) -> int:
        """Rises with everything that the manager may have to act on."""
        with self._changed:
            return self._asked

    def set_held(self, cells: frozenset[str]) -> None:
        """Told often by the training: cells whose replica is busy, or holds a gradient that is not
        at the core yet. It gives no work to a cell that was not a trainer when it last asked."""
        with self._changed:
            self._held = cells
            self._reports += 1
            self._changed.notify_all()

    def wait_released(self, cell: str, limit_s: float) -> bool:
        """Until the training wants nothing more of a cell that is no trainer any longer.

        Returns:
            Whether it said so within ``limit_s``; at once where nothing is left to train.
        """
        with self._changed:
            before = self._reports

            def free() -> bool:
                over = self._stopped or self._error is not None or self._work.expected == 0
                return over or (self._reports > before and cell not in self._held)

            return self._changed.wait_for(free, limit_s)

    def set_cells(self, cells: dict[str, CellState], *, settled: int = -1) -> None:
        """What the manager sees. ``settled`` is the value that ``asked`` had when it found nothing
        to do, with no cell switching; -1 while there is something."""
        switching = any(cell.role is Role.SWITCHING for cell in cells.values())
        with self._changed:
            self._count_served()
            if _roles(cells) != _roles(self._cells):
                self.progress.did("cells", _roles(cells))
            self._cells = dict(cells)
            self._settled = settled
            if switching and self._switching_since is None:
                self._switching_since = time.monotonic()
            if not switching and self._switching_since is not None:
                self._switch_s += time.monotonic() - self._switching_since
                self._switching_since = None
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """The step can't go on; everybody who waits gets ``error``, the first one if several."""
        with self._changed:
            if self._error is None:
                self._error = error
            self._changed.notify_all()

    def stop(self) -> None:
        """The step is over or cancelled."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def check(self) -> None:
        """Raise what ``fail`` was given, if it was."""
        with self._changed:
            if self._error is not None:
                raise self._error

    def wait_change(self, limit_s: float) -> None:
        """Until anything changes, at most ``limit_s`` seconds."""
        with self._changed:
            if not self._stopped and self._error is None:
                self._changed.wait(limit_s)

    def wait_settled(self, limit_s: float) -> bool:
        """Until the manager has done everything that was asked for up to now.

        Returns:
            Whether it has, within ``limit_s``; False too when the step is over before.
        """
        with self._changed:
            asked = self._asked

            def done() -> bool:
                return self._settled >= asked or self._stopped or self._error is not None

            return self._changed.wait_for(done, limit_s) and self._settled >= asked

    def wait_serving(self, limit_s: float) -> None:
        """Until a cell serves ``serve_version``; at once when nothing lives or the step is over.

        Raises:
            TimeoutError: none does within ``limit_s``.
        """
        deadline = time.monotonic() + limit_s
        while True:
            self.check()
            if self.stopped or not self.live:
                return
            if any(
                cell.role is Role.ROLLOUT and cell.engine_version == self.serve_version
                for cell in self.cells()
            ):
                return
            if time.monotonic() > deadline:
                seen = ", ".join(f"{c.name} {c.role} v{c.engine_version}" for c in self.cells())
                raise TimeoutError(
                    f"no cell serves version {self.serve_version} after {limit_s:g} s; seen: {seen}"
                )
            self.wait_change(0.5)

    def _count_served(self) -> None:
        now = time.monotonic()
        serving = sum(cell.role is Role.ROLLOUT for cell in self._cells.values())
        self._served_s += (now - self._seen_at) * serving
        self._seen_at = now

    def _tell_live(self) -> None:
        some = ", ".join(sorted(self._live)[:_NAMED])
        self.progress.waits("rollout", f"{len(self._live)} executions: {some}" * bool(self._live))

    def _note(self) -> None:
        """Something the manager may have to act on has changed; the lock is held."""
        self._asked += 1
        self._changed.notify_all()


def _roles(cells: Mapping[str, CellState]) -> str:
    """What each cell does, in words."""
    return ", ".join(
        f"{cell.name} {cell.role}" + (f" to {cell.target}" if cell.target else "")
        for cell in cells.values()
    )
