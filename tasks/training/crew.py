"""Commands that run on replicas at this moment: one each, from threads of their own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum

from tasks.training.events import MicroStep
from tasks.training.replica import ReplicaLostError

MOST_REPLICAS = 256


class JobKind(StrEnum):
    """What a replica is busy with."""

    MICRO_STEP = "micro_step"
    PUBLISH = "publish"
    JOIN = "join"
    REDUCE = "reduce"


@dataclass(frozen=True)
class Job:
    """A command and who it is for. A reduce also keeps the core busy."""

    kind: JobKind
    replica: str
    micro_step: MicroStep | None = None


@dataclass(frozen=True)
class Done:
    """A job that has ended: with a result, or because its replica is lost."""

    job: Job
    result: object
    lost: ReplicaLostError | None


class Crew:
    """Runs jobs; ``wake`` is called, from any thread, whenever one has ended."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._threads = ThreadPoolExecutor(MOST_REPLICAS, thread_name_prefix="replica")
        self._running: dict[Future[object], tuple[Job, tuple[str, ...]]] = {}

    def busy(self, replica: str) -> bool:
        return any(replica in names for _, names in self._running.values())

    def jobs(self) -> list[Job]:
        """Those under way."""
        return [job for job, _ in self._running.values()]

    def idle(self) -> bool:
        return not self._running

    def running(self, kind: JobKind) -> int:
        return sum(job.kind is kind for job, _ in self._running.values())

    def start(self, job: Job, work: Callable[[], object], *, also: tuple[str, ...] = ()) -> None:
        """Run ``work``; its replica and those in ``also`` are busy until it has ended."""
        future = self._threads.submit(work)
        self._running[future] = (job, (job.replica, *also))
        future.add_done_callback(lambda _: self._wake())

    def finished(self) -> list[Done]:
        """Jobs that ended since the last call.

        Raises:
            Exception: what a job failed with, unless its replica is lost.
        """
        ended = [future for future in self._running if future.done()]
        found: list[Done] = []
        for future in ended:
            job, _ = self._running.pop(future)
            error = future.exception()
            if error is None:
                found.append(Done(job, future.result(), None))
            elif isinstance(error, ReplicaLostError):
                found.append(Done(job, None, error))
            else:
                raise error
        return found

    def close(self) -> None:
        """Start nothing more. What still runs ends at its own deadline; nobody waits for it."""
        self._threads.shutdown(wait=False, cancel_futures=True)
