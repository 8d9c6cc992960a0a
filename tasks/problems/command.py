"""One command of an evaluation, with limits of time and output, and nothing left of it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cells.process import end_group
from tasks.problems.evaluation import EvaluatorError

OUTPUT_BYTES = 1 << 16
_DRAIN_BYTES = 1 << 20


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    exit_code: int | None
    """None: its time was over."""
    output: str
    """The end of what it wrote, standard error included."""


def run_command(
    argv: Sequence[str],
    *,
    cwd: Path,
    environment: Mapping[str, str],
    limit_s: float,
    ends_all: bool = False,
) -> Ended:
    """Run a command to its end, or to the end of its time, and end all that it has started.

    Args:
        ends_all: the end of the command is that of all that it has started (a sandbox sees to it).

    Raises:
        EvaluatorError: it can't be started, or was killed from outside although the agent's code
            can't reach it: the machine is out of memory, or a person did it.
    """
    deadline = time.monotonic() + limit_s
    try:
        process = subprocess.Popen(
            list(argv),
            cwd=cwd,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,
        )
    except OSError as error:
        raise EvaluatorError(f"{argv[0]} can't be started: {error}") from error
    assert process.stdout is not None
    output = bytearray()
    watch = os.pidfd_open(process.pid)
    try:
        in_time = _read_until_end(process.stdout.fileno(), watch, deadline, output)
    finally:
        os.close(watch)
        if ends_all:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        else:
            end_group(process.pid, grace_s=0)
        process.stdout.close()
        process.wait()
    text = bytes(output[-OUTPUT_BYTES:]).decode(errors="replace")
    if not in_time:
        return Ended(None, text)
    if ends_all and process.returncode == -signal.SIGKILL:
        raise EvaluatorError(f"the sandbox was killed from outside; its output ends: {text[-500:]}")
    return Ended(process.returncode, text)


def _read_until_end(pipe: int, watch: int, deadline: float, output: bytearray) -> bool:
    """Keep the end of what comes; whether the process ended by ``deadline`` (monotonic)."""
    sources = [pipe, watch]
    while (left := deadline - time.monotonic()) > 0:
        ready = select.select(sources, [], [], left)[0]
        if pipe in ready and not _take(pipe, output):
            sources = [watch]
        elif watch in ready:
            # What it wrote last; a descendant that goes on writing is not waited for.
            for _ in range(_DRAIN_BYTES // OUTPUT_BYTES):
                if pipe not in sources or not select.select([pipe], [], [], 0)[0]:
                    break
                if not _take(pipe, output):
                    break
            return True
    return False


def _take(pipe: int, output: bytearray) -> bool:
    piece = os.read(pipe, OUTPUT_BYTES)
    output += piece
    if len(output) > 2 * OUTPUT_BYTES:
        del output[:-OUTPUT_BYTES]
    return bool(piece)
