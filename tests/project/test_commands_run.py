"""Every command that a page tells a reader to type is run by a test: here, or by the one named."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner, Result

from configs.load import load_config
from flows.cli import app
from flows.console import ExitCode
from flows.sweep.plan import Axis, keep_plan, make_plan
from storage.objects import Store
from tests.flows.recorded import record_run
from tests.project.test_commands import PAGES, ROOT, commands

ELSEWHERE = {
    "train": (
        "tests/flows/conftest.py",
        "tests/flows/test_cells_elsewhere.py",
        "tests/flows/test_operated.py",
    ),
    "train --resume": ("tests/flows/test_resumed_run.py",),
    "serve": ("tests/flows/operated.py",),
    "deploy": ("tests/flows/test_operated.py", "tests/flows/test_automations_fire.py"),
    "schedule": ("tests/flows/test_operated.py",),
    "sweep": ("tests/flows/test_operated.py",),
    "evaluate": ("tests/flows/test_operated.py", "tests/flows/test_runs_cli.py"),
    "rescore": ("tests/flows/test_smoke_rescore.py",),
    "doctor": ("tests/flows/doctor/test_doctor_cli.py",),
    "harness": ("tests/tasks/rollout/test_clients.py",),
    "export": ("tests/flows/test_export_cli.py",),
    "fsck": ("tests/chaos/test_fsck.py",),
    "host": ("tests/flows/test_cells_elsewhere.py",),
    "replay": ("tests/flows/test_smoke_replay.py",),
    "inspect": ("tests/flows/test_inspections.py",),
    "samples": ("tests/flows/test_inspections.py",),
    "simulate": (
        "tests/cells/simulation/test_commands.py",
        "tests/cells/simulation/test_alternatives.py",
        "tests/cells/simulation/test_recorded.py",
    ),
    "plan": ("tests/cells/simulation/test_commands.py", "tests/flows/test_layout_plan.py"),
}
"""Commands that need a server, a real run, downloads or minutes, and the files that run them."""
RUN = "first"
_PLACES = {
    "<run>": RUN,
    "RUN": RUN,
    "/data/gyre": ".gyre",
    "s3://bucket/gyre": "s3://gyre/nothing",
    "quickstart-20260101-120000": RUN,
}
"""What a reader puts in the place of a word."""


def plain(text: str) -> list[str]:
    """The words of a line as a shell gives them, without a comment or where output goes."""
    line = re.split(r"\s#\s|\s+[|>]\s", text)[0]
    return [_PLACES.get(word, word) for word in shlex.split(line)]


def elsewhere(words: list[str]) -> tuple[str, ...]:
    """The files that run a command; none when it is run here."""
    if words[0] == "sweep" and {"--check", "--show"} & set(words):
        return ()
    for option in options(words):
        if found := ELSEWHERE.get(f"{words[0]} {option}"):
            return found
    return ELSEWHERE.get(words[0], ())


def options(words: list[str]) -> list[str]:
    """The options of a command; brackets say that one may be left out."""
    plain = (word.strip("[]").partition("=")[0] for word in words)
    return [word for word in plain if word.startswith("--")]


def written() -> Iterator[tuple[str, list[str]]]:
    """Page and words of each command that is complete: one in a text may be its name alone."""
    for page in PAGES:
        for text in commands(page):
            words = plain(text)
            if len(words) > 1 or words[0] in ("runs", "doctor"):
                yield page.name, words


HERE = sorted({tuple(words) for _, words in written() if not elsewhere(words)})
THERE = sorted({tuple(words) for _, words in written() if elsewhere(words)})


@pytest.fixture(scope="module")
def written_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader has: a run, a sweep and a file of settings."""
    folder = tmp_path_factory.mktemp("reader")
    root = folder / ".gyre"
    record_run(root, RUN)
    caps = Axis(key="trajectory.cap", values=("1", "2", "5", "none"))
    keep_plan(Store(root), make_plan("caps", [caps], 3, "smoke", [], str(root))[0])
    (folder / "my.yaml").write_text("preset: smoke\nname: mine\n")
    return folder


@pytest.fixture
def folder(written_folder: Path, s3: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a reader types; with a bucket, without a Prefect server."""
    monkeypatch.chdir(written_folder)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    monkeypatch.setenv("PREFECT_HOME", os.devnull)
    return written_folder


def gyre(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


@pytest.mark.parametrize("words", HERE, ids=" ".join)
def test_a_command_of_a_page_ends_well(words: tuple[str, ...], folder: Path) -> None:
    done = gyre(*words)
    # Without a server there is nothing to attach to, and the run is over.
    allowed = {0} if words[0] != "attach" else {0, ExitCode.FAILED, ExitCode.BAD_INPUT}
    assert done.exit_code in allowed, done.output
    assert done.output.strip()


@pytest.mark.parametrize("words", THERE, ids=" ".join)
def test_a_command_is_run_with_all_its_options_by_the_files_that_are_named(
    words: tuple[str, ...],
) -> None:
    text = "".join((ROOT / file).read_text("utf-8") for file in elsewhere(list(words)))
    assert f'"{words[0]}"' in text
    assert [one for one in options(list(words)) if f'"{one}"' not in text] == []


def settings_of(words: tuple[str, ...]) -> list[str]:
    """What follows ``--set``."""
    return [after for word, after in pairwise(words) if word == "--set"]


@pytest.mark.parametrize("words", [one for one in THERE if "--set" in one], ids=" ".join)
def test_settings_that_a_page_gives_a_command_are_accepted(
    words: tuple[str, ...], folder: Path
) -> None:
    config = words[words.index("--config") + 1] if "--config" in words else "quickstart"
    assert load_config(config, settings_of(words))


def test_every_exit_code_is_in_the_documents_and_comes_up(folder: Path) -> None:
    text = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    table = text.partition("## Exit codes")[2]
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}
    assert documented == {0, *ExitCode}
    assert gyre("runs").exit_code == 0
    assert gyre("deploy").exit_code == ExitCode.FAILED
    assert gyre("show", "no-such-run").exit_code == ExitCode.BAD_INPUT
    assert gyre("config", "check", "--set", "trianing.steps=1").exit_code == ExitCode.BAD_INPUT
    assert gyre("runs", "--no-such-option").exit_code == ExitCode.BAD_INPUT
    wrong = ("--set", "model.source=hf_directory", "--set", "model.path=/nowhere")
    assert gyre("train", *wrong).exit_code == ExitCode.NOT_READY
    # 130 is what a cancelled run ends with: tests/flows/test_cancelled_run.py.


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("gyre tra", "train"), ("gyre config ", "check"), ("gyre train --se", "--seed")],
)
def test_a_shell_completes_commands_and_options(typed: str, offered: str) -> None:
    words = typed.split(" ")
    environment = {
        "_GYRE_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(words) - 1),
    }
    command = get_command(app)
    done = CliRunner().invoke(app, [], env=environment, prog_name="gyre")
    assert command.name == "gyre"
    assert offered in done.output.split()


def test_the_settings_of_the_folder_are_those_of_a_preset(folder: Path) -> None:
    assert load_config(str(folder / "my.yaml")).rollout == load_config("smoke").rollout
