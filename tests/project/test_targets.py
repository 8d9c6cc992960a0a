"""Make targets, set-up and documents say only what is there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
TARGETS = ("quickstart", "test", "check-long", "clean", "lock", "audit", "setup")


def _make(*arguments: str) -> str:
    done = subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


def test_help_lists_the_targets() -> None:
    listed = _make("help")
    for target in TARGETS:
        assert f"make {target} " in listed


@pytest.mark.parametrize("target", ["quickstart", "test"])
def test_targets_set_up_first(target: str) -> None:
    assert _make("--dry-run", target).startswith("bash scripts/setup.sh")


def test_ci_ends_with_the_tests() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert _make("--dry-run", "test").rstrip().endswith("-m pytest")


@pytest.mark.parametrize("script", ["scripts/setup.sh", "scripts/audit.sh", ".ci/run"])
def test_shell_scripts_parse(script: str) -> None:
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True, timeout=20)


def _machine(folder: Path, *names: str) -> dict[str, str]:
    """An environment whose PATH holds only the named programs."""
    for name in names:
        found = shutil.which(name)
        assert found, name
        (folder / name).symlink_to(found)
    return {"PATH": str(folder)}


def test_set_up_says_what_is_missing_where_there_is_no_apt(tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup.sh", project / "scripts")
    shutil.copytree(ROOT / "requirements", project / "requirements")
    shutil.copy(ROOT / "pyproject.toml", project)
    programs = tmp_path / "bin"
    programs.mkdir()
    tools = ("bash", "dirname", "uname", "flock", "mktemp", "rm", "grep")
    done = subprocess.run(
        ["bash", "scripts/setup.sh"],
        cwd=project,
        env=_machine(programs, *tools),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "set-up failed: this machine lacks bubblewrap" in done.stdout
    assert "no apt-get" in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    headings = {_anchor(line) for line in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        if path:
            assert (page.parent / path).exists(), target
        else:
            assert anchor in headings, target


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_settings_in_pages_exist(page: Path) -> None:
    from configs.schema import setting_rows

    keys = {row.key for row in setting_rows()}
    sections = {key[: dot.start()] for key in keys for dot in re.finditer(r"\.", key)}
    tops = {key.partition(".")[0] for key in keys}
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+(?:\[\])?)+)`", text):
        if name.partition(".")[0] in tops - {"storage", "cells"}:
            assert name in keys | sections, name
    for target in re.findall(r"`make ([a-z-]+)", text):
        assert target in (*TARGETS, "help"), target
    for command in re.findall(r"\bgyre ((?:config )?[a-z]+)\b(?=[^\n]*`|$)", text):
        assert command.split()[0] in _commands(), command


def _commands() -> set[str]:
    from typer.main import get_command

    from flows.cli import app

    return set(getattr(get_command(app), "commands", {}))
