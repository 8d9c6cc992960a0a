"""Why a process ended, out of its log: what a person needs of hundreds of lines."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

LOG_BYTES = 256 << 10
_LINE_CHARACTERS = 600
_MESSAGE_LINES = 6

CAN_NOT_START = "can't start: "
"""A daemon of ours ends its log with this and a text that is clear already."""

_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = (
    "During handling of the above exception",
    "The above exception was the direct cause",
)
_FRAME = re.compile(r"^[\s|+-]*")
_ERROR = re.compile(r"^(?:[A-Za-z_][\w]*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Failure)\b")
_STAMP = re.compile(r"^(?:\[|\d{4}-\d\d-\d\d|[A-Z]+:\s|[IWEF]\d{4})")
_TAKEN = re.compile(r"\[Errno 98\] error while attempting to bind .*")
"""What uvicorn says of a port that is taken, without a traceback; SGLang then asks whoever has the
port, and leaves a traceback of that."""
_ENDED_ON_DEMAND = ("KeyboardInterrupt", "SystemExit", "asyncio.exceptions.CancelledError")

_ADVICE: Sequence[tuple[str, str]] = (
    (
        r"[Aa]ddress already in use|Errno 98\b",
        "another program has the port: end it, or choose another port (gyre doctor shows which)",
    ),
    (
        r"Cannot allocate memory|MemoryError|DefaultCPUAllocator|out of memory|OutOfMemory|"
        r"[Nn]ot enough memory",
        "too little memory: lower cells.kv_tokens or the number of cells, or end other programs",
    ),
    (
        r"No space left on device|Errno 28\b",
        "a disk is full, or /dev/shm: free some; gyre gc --dry-run shows what can go",
    ),
    (r"Too many open files|Errno 24\b", "raise the limit of open files: ulimit -n 65536"),
    (
        r"greater than the derived context_length",
        "model.context is more than the model's max_position_embeddings: lower it",
    ),
    (
        r"SafetensorError|safetensors",
        "a file of the weights is damaged: delete the policy from the storage root, or copy "
        "model.path again",
    ),
    (r"ModuleNotFoundError|ImportError", "the environment is incomplete: make setup"),
)


def log_since(log: Path, offset: int) -> str:
    """What was appended to a log from ``offset`` on, at most its last ``LOG_BYTES``."""
    try:
        with open(log, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(offset, size - LOG_BYTES, 0))
            return file.read().decode(errors="replace")
    except OSError as error:
        return f"{log}: can't be read: {error.strerror}"


def log_size(log: Path) -> int:
    """Where what comes next begins; 0 when there is no log yet."""
    try:
        return log.stat().st_size
    except OSError:
        return 0


def reason(text: str) -> str:
    """The cause in the log of a process that ended: its own last words, else the first exception
    (what follows is mostly of others that noticed), else the last line; then what to do."""
    own = text.rfind(CAN_NOT_START)
    if own >= 0:
        return text[own + len(CAN_NOT_START) :].strip()
    taken = _TAKEN.search(text)
    found = taken[0] if taken else _first_exception(text) or last_line(text)
    if not found:
        return "it left no word"
    advice = next((what for pattern, what in _ADVICE if re.search(pattern, found)), "")
    return f"{found}\n{advice}" if advice else found


def exit_words(code: int) -> str:
    """How a process ended, in words; negative codes are signals."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    if -code == signal.SIGKILL:
        return f"was killed ({name}), by its own parts or by a machine that ran out of memory"
    return f"was ended by {name}"


def _first_exception(text: str) -> str:
    """The end of the first chain of tracebacks: the first is the cause, its last link the words."""
    lines = [
        _FRAME.sub("", line) if line.lstrip().startswith(("|", "+")) else line
        for line in text.splitlines()
    ]
    starts = [number for number, line in enumerate(lines) if line.rstrip().endswith(_TRACEBACK)]
    found = ""
    for place, start in enumerate(starts):
        if found and not _continues(lines, start):
            break
        end = starts[place + 1] if place + 1 < len(starts) else len(lines)
        message = _message(lines[start + 1 : end])
        if message and not message.startswith(_ENDED_ON_DEMAND):
            found = message
    return found


def _continues(lines: Sequence[str], start: int) -> bool:
    return any(line.startswith(_CHAINED) for line in lines[max(0, start - 3) : start])


def _message(lines: Sequence[str]) -> str:
    for number, line in enumerate(lines):
        if not _ERROR.match(line):
            continue
        message = [line]
        for more in lines[number + 1 : number + _MESSAGE_LINES]:
            if not more.strip() or _STAMP.match(more) or more.startswith(_CHAINED):
                break
            message.append(more)
        return "\n".join(part[:_LINE_CHARACTERS].rstrip() for part in message)
    return ""


def last_line(text: str) -> str:
    """The last line that is not empty; empty when there is none."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:_LINE_CHARACTERS] if lines else ""
