"""What a pytest run found, from a file that our own plugin writes and never from printed text."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from tasks.problems.evaluation import Mounted
from tasks.problems.left_behind import read_regular
from tasks.problems.report_plugin import IMPORT_FROM, REPORT

REPORT_BYTES = 64 << 20
_PLUGIN = "gyre_report"


@dataclass(frozen=True)
class Case:
    """One test."""

    path: str
    """Absolute path of its file, as the run saw it."""
    name: str
    passed: bool


@dataclass(frozen=True)
class PytestResult:
    """What one or more pytest runs found."""

    cases: tuple[Case, ...]
    """In the order in which they ended; tests of a run that was cut short are not there."""
    uncollected: tuple[str, ...]
    """Files whose tests could not be collected."""
    started: int
    """How often pytest started."""
    ended: int
    """How often it came to its own end."""


class PytestReport:
    """Makes pytest runs write a report, and reads it.

    The plugin is mounted read-only, the report writable. pytest runs the agent's code in its own
    process, so code that looks for the report can write to it: where that must not be, the tests
    have to call the code in another process, as the built-in problems do.

    Args:
        folder: an empty one, outside of the workspace.
    """

    def __init__(self, folder: Path) -> None:
        self._plugin = folder / "plugin"
        self._report = folder / "report"
        self._plugin.mkdir(parents=True)
        self._report.mkdir()
        source = Path(__file__).with_name("report_plugin.py")
        shutil.copyfile(source, self._plugin / f"{_PLUGIN}.py")
        self.file.touch()

    @property
    def file(self) -> Path:
        return self._report / "report.jsonl"

    @property
    def mounts(self) -> tuple[Mounted, ...]:
        """What a sandbox has to show, at the machine's paths. What can be written is the one file,
        whose size can be limited."""
        return (
            Mounted(self._plugin, str(self._plugin)),
            Mounted(self.file, str(self.file), writable=True),
        )

    def environment(self, import_from: str = "") -> dict[str, str]:
        """Variables for the commands that run pytest.

        Args:
            import_from: folder that tests import from. It is not on the path while Python and
                pytest start, so that no file in it can take the place of one of theirs.
        """
        return {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            "PYTHONPATH": str(self._plugin),
            "PYTHONSAFEPATH": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_ADDOPTS": f"-p {_PLUGIN} -p no:cacheprovider",
            REPORT: str(self.file),
            IMPORT_FROM: import_from,
            "LC_ALL": "C.UTF-8",
        }

    def read(self) -> PytestResult:
        """What was found. Lines that make no sense are left out: only code that pytest ran, and
        that is the agent's, can have written them."""
        cases: list[Case] = []
        uncollected: list[str] = []
        started = ended = 0
        for line in self._lines():
            try:
                found = json.loads(line)
                if "test" in found:
                    path, _, name = str(found["test"]).partition("::")
                    cases.append(Case(path, name, found["passed"] is True))
                elif "error" in found:
                    uncollected.append(str(found["error"]))
                started += "start" in found
                ended += "end" in found
            except (ValueError, TypeError, KeyError, RecursionError):
                continue
        return PytestResult(tuple(cases), tuple(uncollected), started, ended)

    def _lines(self) -> list[bytes]:
        return (read_regular(self.file, REPORT_BYTES) or b"").split(b"\n")
