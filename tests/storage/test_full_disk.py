"""A real, small, full file system: what is stored stays, what is not is told, and it goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = """
import os, sys
from pathlib import Path
from configs.load import load_config
from storage.errors import DiskFullError
from storage.journal import Journal, append_line, read_journal, read_lines
from storage.objects import Store
from storage.run import create_run

root = Path(sys.argv[1])
store = Store(root)
store.write("object", b"old" * 1000)
journal = Journal(store, "journal")
journal.append([b"first"])
append_line(store, "lines", b"first")

with open(root / "filler", "wb", buffering=0) as filler:
    for block in (65536, 4096, 512, 1):
        try:
            while True:
                filler.write(b"x" * block)
        except OSError:
            continue

def told(what):
    try:
        what()
    except DiskFullError as error:
        text = str(error)
        assert "No space left on device (0.0 of 1.0 MB are free)" in text, text
        assert "gyre gc --dry-run" in text
        assert str(root) in text
        return
    raise AssertionError("not told")

big = b"y" * 100_000
told(lambda: store.write("object", big))
told(lambda: store.write("new", big))
told(lambda: store.write_once("once", big))
told(lambda: journal.append([big]))
told(lambda: append_line(store, "lines", big))
told(lambda: create_run(str(root), "a-run", load_config(environment={})))

assert store.read("object") == b"old" * 1000
assert read_journal(store, "journal") == [b"first"]
assert read_lines(store, "lines") == [b"first"]
assert store.children("runs") == [], store.keys("runs")
assert [path for path in root.rglob(".writing-*")] == []
assert not store.exists("new") and not store.exists("once")

os.unlink(root / "filler")
journal.append([b"second"])
append_line(store, "lines", b"second")
assert read_journal(store, "journal") == [b"first", b"second"]
assert read_lines(store, "lines") == [b"first", b"second"]
assert create_run(str(root), "a-run", load_config(environment={})).run_id == "a-run"
print("as it should be")
"""


@pytest.mark.real
def test_a_full_file_system(tmp_path: Path) -> None:
    mount = ["bwrap", "--dev-bind", "/", "/", "--size", str(1 << 20), "--tmpfs", str(tmp_path)]
    done = subprocess.run(
        [*mount, "--", sys.executable, "-c", _SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "as it should be\n", done.stderr
