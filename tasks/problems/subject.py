"""Asks the agent's code what it returns, from outside of its process."""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from cells.process import end_group
from tasks.problems.evaluation import BARE, Enclosure, EvaluationLimits, EvaluatorError

CALL_LIMIT_S = 2.0
"""Processor time of one call, or wall time where that can't be known."""
CALL_WALL_S = 6.0
"""Wall time of one call: on a busy machine a short one can take long."""
START_LIMIT_S = 30.0
REPLY_LIMIT_BYTES = 1 << 18
_ANSWERER = Path(__file__).with_name("answerer.py").read_text(encoding="utf-8")


class SubjectError(Exception):
    """The agent's code raised, hung, ended its process or answered nonsense; the text says what."""


class OutOfTimeError(SubjectError):
    """The evaluation's time is over."""


class Subject:
    """The functions in a workspace, called in a process of their own.

    A process that hangs or dies is replaced at the next call, so that one bad function does not
    fail the others. A file that can't be imported fails once and is not tried again.

    Args:
        workspace: folder with the agent's files.
        limits: time of all calls together, from now on, and memory.
        enclosure: the sandbox of the process.
    """

    def __init__(
        self, workspace: Path, limits: EvaluationLimits, enclosure: Enclosure = BARE
    ) -> None:
        self._workspace = workspace
        self._limits = limits
        self._prefix = tuple(enclosure.prefix())
        self._ends_all = enclosure.ends_all
        self._deadline = time.monotonic() + limits.seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._over = False
        """Nothing more will come from the process."""
        self._inner = 0
        """Pid of the process behind the sandbox's own."""
        self._loaded: set[str] = set()
        self._broken: dict[str, str] = {}

    def __enter__(self) -> Subject:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def call(self, path: str, function: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """What ``function`` of the file ``path`` returns for each row of arguments.

        Raises:
            SubjectError: it is the agent's fault; OutOfTimeError when no time is left.
            EvaluatorError: the process could not be started at all.
        """
        if path in self._broken:
            raise SubjectError(self._broken[path])
        if self._process is None:
            self._start()
        if path not in self._loaded:
            try:
                self._ask(("load", path))
            except OutOfTimeError:
                raise
            except SubjectError as error:
                self._broken[path] = f"{path}: {error}"
                raise SubjectError(self._broken[path]) from None
            self._loaded.add(path)
        return self._ask(("call", path, function, [list(row) for row in arguments]))

    def close(self) -> None:
        """End the process and its descendants."""
        process, self._process = self._process, None
        self._loaded.clear()
        self._buffer = b""
        self._over = False
        if process is None:
            return
        if self._ends_all:
            # Its end is that of all inside. To look for descendants costs as much as the tests.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        else:
            end_group(process.pid, grace_s=0)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        process.wait()

    def _start(self) -> None:
        cpu_s = math.ceil(self._limits.seconds) + 1
        command = [sys.executable, "-I", "-S", "-c", _ANSWERER]
        try:
            self._process = subprocess.Popen(
                [*self._prefix, *command, str(self._limits.memory_mb), str(cpu_s)],
                cwd=self._workspace,
                env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            raise EvaluatorError(f"the tests' process can't be started: {error}") from error
        # No line of the agent's code has run yet, so a failure here is ours.
        if self._line(time.monotonic() + START_LIMIT_S) != b'{"ready": true}':
            self.close()
            raise EvaluatorError(
                f"the tests' process did not come up within {START_LIMIT_S:g} s: "
                f"{' '.join([*self._prefix, sys.executable])}"
            )
        self._inner = _innermost(self._process.pid)

    def _ask(self, request: tuple[Any, ...]) -> list[Any]:
        now = time.monotonic()
        if now >= self._deadline:
            self.close()
            raise OutOfTimeError("no time left")
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(repr(request).encode() + b"\n")
        except OSError:
            self.close()
            raise SubjectError("its process ended") from None
        line = self._answer(now)
        if line is None:
            over = time.monotonic() >= self._deadline
            hung = self._process.poll() is None
            self.close()
            if over:
                raise OutOfTimeError("no time left")
            raise SubjectError("hangs" if hung else "its process ended")
        try:
            reply = json.loads(line, object_hook=_plain)
            if "error" in reply:
                raise SubjectError(str(reply["error"])[:80])
            return list(reply["values"])
        except (ValueError, KeyError, TypeError, RecursionError):
            self.close()
            raise SubjectError("its process answered nonsense") from None

    def _answer(self, now: float) -> bytes | None:
        """The reply to what was just asked; None when there is none in the time of a call."""
        cpu_s = _cpu_s(self._inner)
        line = self._line(min(now + CALL_LIMIT_S, self._deadline))
        end = min(now + CALL_WALL_S, self._deadline)
        while line is None and not self._over and time.monotonic() < end:
            if cpu_s is None or (_cpu_s(self._inner) or math.inf) - cpu_s >= CALL_LIMIT_S:
                break
            line = self._line(min(time.monotonic() + 0.25, end))
        return line

    def _line(self, deadline: float) -> bytes | None:
        """The next line; None when there is none by ``deadline`` (monotonic) or none will come."""
        assert self._process is not None and self._process.stdout is not None
        number = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([number], [], [], left)[0]:
                return None
            piece = os.read(number, 1 << 16)
            if not piece or len(self._buffer) > REPLY_LIMIT_BYTES:
                self._over = True
                return None
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


def _innermost(pid: int) -> int:
    """The descendant that works, where each process between has only one child."""
    while True:
        try:
            with open(f"/proc/{pid}/task/{pid}/children") as file:
                children = file.read().split()
        except OSError:
            return pid
        if len(children) != 1:
            return pid
        pid = int(children[0])


def _cpu_s(pid: int) -> float | None:
    """Processor time of a process; None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _plain(found: dict[str, Any]) -> Any:
    """The value that the answerer had to put a name to, because JSON has no such kind."""
    if len(found) != 1:
        return found
    (kind, items), *_ = found.items()
    if kind == "tuple":
        return tuple(items)
    if kind == "set":
        return set(items)
    if kind == "dict":
        return dict(items)
    return found
