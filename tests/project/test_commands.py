"""Every command that a page tells a reader to type is there, with every option that it uses."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from flows.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
GYRE = get_command(app)
_LINE = re.compile(r"^(?:srun (?:--\S+ )*)?(?:[A-Z_]+=\S+ )*(?:\S*/)?gyre (.*?)(?: &)?$")
_SHELL = ("sh", "bash", "console")
_SPAN = re.compile(r"`(?:[A-Z_]+=\S+ )*gyre ([^`]+)`")


def commands(page: Path) -> Iterator[str]:
    """What follows ``gyre`` in code blocks and in code spans of a page."""
    for block, line in lines(page.read_text(encoding="utf-8")):
        if block:
            for part in line.split(";"):
                if found := _LINE.match(part.strip()):
                    yield found.group(1)
        else:
            yield from (found.group(1) for found in _SPAN.finditer(line))


def lines(text: str) -> Iterator[tuple[bool, str]]:
    """Whether a line is one that a shell is given, or text; lines of other blocks are left out."""
    fence: str | None = None
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("```"):
            fence = None if fence else line.strip("` ") or "text"
        elif fence is None or fence in _SHELL:
            yield fence is not None or line.startswith("    "), line


def unknown(text: str) -> set[str]:
    """Options of a line that its command does not have; a command that is not there too."""
    plain = re.split(r"\s#\s|\s+[|>]\s", text)[0].replace("[", "").replace("]", "")
    words = shlex.split(plain)
    command: Any = GYRE
    while (below := getattr(command, "commands", None)) and words and words[0][0] != "-":
        name = words.pop(0)
        if name not in below:
            return {name}
        command = below[name]
    known = {"--help"}
    for one in command.params:
        known.update(one.opts, one.secondary_opts)
    given = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    return given - known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_options_in_pages_are_there(page: Path) -> None:
    for text in commands(page):
        assert not unknown(text), f"gyre {text}"


def test_the_pages_show_the_commands_that_people_need() -> None:
    shown = {text.split()[0] for page in PAGES for text in commands(page)}
    needed = {"train", "attach", "evaluate", "sweep", "serve", "deploy", "schedule", "pause", "gc"}
    assert needed <= shown


@pytest.mark.parametrize("text", ["sweeep caps", "sweep caps --parm a=1", "config chek"])
def test_what_is_not_there_is_found(text: str) -> None:
    assert unknown(text)
