"""Where sealed groups come in while their step is still running."""

from __future__ import annotations

import threading


class GroupFeed:
    """Sealed groups on their way to the training of one step. Any thread may put.

    Whoever makes one closes it or fails it: training waits for the groups of an update until then.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[str] = []
        self._complete = False
        self._error: BaseException | None = None
        self._woken = False

    def put(self, query_id: str) -> None:
        """The group of this query is sealed. One that is known already is ignored by training."""
        with self._changed:
            self._waiting.append(query_id)
            self._notify()

    def close(self) -> None:
        """No further group of this step will come."""
        with self._changed:
            self._complete = True
            self._notify()

    def fail(self, error: BaseException) -> None:
        """The step can't go on; training ends with ``error``."""
        with self._changed:
            self._error = error
            self._notify()

    def take(self) -> tuple[list[str], bool]:
        """Groups since the last call, and whether they are the last.

        Raises:
            BaseException: what ``fail`` was given.
        """
        with self._changed:
            if self._error is not None:
                raise self._error
            found, self._waiting = self._waiting, []
            return found, self._complete

    def wake(self) -> None:
        """Let ``wait`` return."""
        with self._changed:
            self._notify()

    def wait(self, limit_s: float) -> None:
        """Until something has changed since the last call, at most ``limit_s`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._woken, timeout=limit_s)
            self._woken = False

    def _notify(self) -> None:
        self._woken = True
        self._changed.notify_all()
