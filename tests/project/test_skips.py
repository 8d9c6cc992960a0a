"""The rule about skips, in a pytest of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.skips import EXPECTED

ROOT = Path(__file__).parents[2]


UNEXPECTED = {
    "called": "def test_a():\n    pytest.skip('no time')",
    "marked": "@pytest.mark.skip(reason='no time')\ndef test_a():\n    pass",
    "import": "pytest.importorskip('a_module_that_is_not_there', reason='no time')",
    "xfail": "@pytest.mark.xfail(reason='no time')\ndef test_a():\n    assert False",
}


def _run(folder: Path, bodies: dict[str, str]) -> tuple[int, str]:
    for name, body in bodies.items():
        text = f"import pytest\n\n{body}\n"
        (folder / f"test_{name}.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "tests.skips", "-c", "/dev/null"]
    command += [
        "--continue-on-collection-errors",
        "--rootdir",
        str(folder),
        "-p",
        "no:cacheprovider",
        str(folder),
    ]
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=120, check=False
    )
    return done.returncode, done.stdout


def test_an_unexpected_skip_fails_the_run(tmp_path: Path) -> None:
    code, output = _run(tmp_path, {**UNEXPECTED, "passes": "def test_b():\n    pass"})
    assert code != 0
    assert output.count("not in tests/skips.py: no time") == len(UNEXPECTED)
    assert "2 failed, 1 passed, 2 errors" in output  # before a test starts, it is an error


def test_an_expected_skip_passes(tmp_path: Path) -> None:
    reason = next(iter(EXPECTED))
    body = f"def test_b():\n    pass\n\ndef test_a():\n    pytest.skip({reason!r})"
    code, output = _run(tmp_path, {"gpu": body})
    assert (code, "1 passed, 1 skipped" in output) == (0, True), output


def test_every_expected_reason_is_explained() -> None:
    assert all(len(why) > 20 for why in EXPECTED.values())
