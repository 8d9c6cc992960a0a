"""What each part of a step did last and what it waits for, so that a hang ends and names itself.

Every wait has a deadline of its own; this is for the one that somebody forgot, and for those that
wait for each other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_LOOK_EVERY_S = 5.0


class HangError(RuntimeError):
    """Nothing has moved for too long; the text says what each part waited for."""


@dataclass(frozen=True)
class _Told:
    what: str
    since: float
    """On the monotonic clock."""


class Progress:
    """Told by all parts of a step, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._moved = time.monotonic()
        self._did: dict[str, _Told] = {}
        self._waits: dict[str, _Told] = {}

    def did(self, part: str, what: str) -> None:
        """Something moved."""
        with self._lock:
            self._moved = time.monotonic()
            self._did[part] = _Told(what, self._moved)

    def waits(self, part: str, what: str) -> None:
        """From now on, or still; the empty text when it waits for nothing."""
        with self._lock:
            known = self._waits.get(part)
            if not what:
                self._waits.pop(part, None)
            elif known is None or known.what != what:
                self._waits[part] = _Told(what, time.monotonic())

    @property
    def silent_s(self) -> float:
        """Since anything moved."""
        with self._lock:
            return time.monotonic() - self._moved

    def told(self) -> str:
        """A line for each part."""
        now = time.monotonic()
        with self._lock:
            lines = []
            for part in sorted({*self._did, *self._waits}):
                waits, did = self._waits.get(part), self._did.get(part)
                text = f"waits for {waits.what}, {now - waits.since:.0f} s" if waits else "at work"
                last = f"; last: {did.what}, {now - did.since:.0f} s ago" if did else ""
                lines.append(f"{part}: {text}{last}")
        return "\n".join(lines)


@contextmanager
def ended_when_silent(
    progress: Progress, limit_s: float, end: Callable[[HangError], None]
) -> Iterator[None]:
    """Watch for as long as the block lasts; ``end`` is called once, from another thread, when
    nothing has moved for ``limit_s`` seconds."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(min(_LOOK_EVERY_S, limit_s / 4)):
            if progress.silent_s > limit_s:
                end(
                    HangError(
                        f"nothing has moved for {limit_s:g} s (cells.progress_limit_s):\n"
                        f"{progress.told()}"
                    )
                )
                return

    thread = threading.Thread(target=watch, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
