"""The cause of a process's end, out of logs as they really look."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from cells.reason import LOG_BYTES, exit_words, last_line, log_since, log_size, reason

SGLANG_TRUNCATED = """\
[2026-11-29 20:53:17] No HuggingFace chat template found
Multi-thread loading shards:   0% Completed | 0/1 [00:00<?, ?it/s]
[2026-11-29 20:53:24] Scheduler hit an exception: Traceback (most recent call last):
  File "/x/sglang/srt/managers/scheduler.py", line 4000, in run_scheduler_process
    scheduler = Scheduler(
                ^^^^^^^^^^
  File "/x/sglang/srt/model_loader/weight_utils.py", line 1354, in _load_file
    with safetensors.safe_open(st_file, framework="pt", device="cpu") as f:
safetensors._safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata

[2026-11-29 20:53:24] Received sigquit from a child process. It usually means the child failed.
Traceback (most recent call last):
  File "/x/launch.py", line 9, in <module>
RuntimeError: a later error of another process
"""

CHAINED = """\
Traceback (most recent call last):
  File "a.py", line 1, in f
KeyError: 'vocab_size'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "a.py", line 3, in g
ValueError: config.json: the key 'vocab_size' is missing
INFO:     Shutting down
"""

GROUP = """\
  + Exception Group Traceback (most recent call last):
  |   File "/x/__main__.py", line 167, in main
  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/x/daemon.py", line 120, in run
    | OSError: [Errno 98] Address already in use
    +------------------------------------
"""

TAKEN = """\
[2026-11-30 10:05:07] ERROR:    [Errno 98] error while attempting to bind on address \
('127.0.0.1', 15474): address already in use
[2026-11-30 10:05:07] post-warmup freeze_gc failed
Traceback (most recent call last):
  File "/x/sglang/srt/entrypoints/http_server.py", line 2561, in _freeze_gc_after_server_warmup
    res = requests.post(
requests.exceptions.ConnectionError: ('Connection aborted.', ConnectionResetError(104, 'reset'))
"""

INTERRUPTED = """\
Traceback (most recent call last):
  File "a.py", line 1, in <module>
KeyboardInterrupt
all is well
"""


@pytest.mark.parametrize(
    ("log", "first", "advice"),
    [
        (
            SGLANG_TRUNCATED,
            "safetensors._safetensors_rust.SafetensorError: Error while deserializing header: "
            "incomplete metadata",
            "file of the weights is damaged",
        ),
        (CHAINED, "ValueError: config.json: the key 'vocab_size' is missing", None),
        (GROUP, "OSError: [Errno 98] Address already in use", "gyre doctor"),
        (INTERRUPTED, "all is well", None),
        ("one\n\ntwo \n", "two", None),
        ("", "it left no word", None),
        (
            "old line\n2026 cells.host ERROR cell-a can't start: SGLang ended: MemoryError\nlog: x",
            "SGLang ended: MemoryError",
            "log: x",
        ),
    ],
)
def test_the_cause_and_what_to_do(log: str, first: str, advice: str | None) -> None:
    lines = reason(log).splitlines()
    assert lines[0] == first
    assert len(lines) == (1 if advice is None else 2)
    assert advice is None or advice in lines[1]


def test_a_message_of_several_lines_is_kept_and_a_long_one_cut() -> None:
    log = "Traceback (most recent call last):\n  File x\nValueError: one\ntwo\n\nthree\n"
    assert reason(log) == "ValueError: one\ntwo"
    endless = "Traceback (most recent call last):\nValueError: " + "x" * 10_000
    assert len(reason(endless)) < 700


def test_only_what_this_start_wrote_is_looked_at(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert log_size(log) == 0
    log.write_text(CHAINED)
    before = log_size(log)
    with open(log, "a") as file:
        file.write("of this start\n")
    assert log_since(log, before) == "of this start\n"
    assert reason(log_since(log, before)) == "of this start"


def test_a_huge_log_is_read_from_its_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * (LOG_BYTES * 2) + b"\nlast\n")
    text = log_since(log, 0)
    assert len(text) == LOG_BYTES
    assert last_line(text) == "last"
    assert "No such file" in log_since(tmp_path / "none", 0)


def test_ends_in_words() -> None:
    assert exit_words(3) == "ended with exit code 3"
    assert exit_words(-signal.SIGTERM) == "was ended by SIGTERM"
    assert "ran out of memory" in exit_words(-signal.SIGKILL)
    assert exit_words(-200) == "was ended by signal 200"


def test_a_taken_port_is_the_cause_and_not_what_its_owner_answered() -> None:
    found = reason(TAKEN)
    assert "('127.0.0.1', 15474): address already in use" in found
    assert "choose another port" in found
    assert "ConnectionError" not in found
