"""What of a task's environment can be had without a container."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tasks.problems.folders import read_text, read_tree
from tasks.problems.harbor.task import CONFIG, TEST, Task
from tasks.problems.source import ProblemSourceError

_BASES = ("ubuntu", "debian", "python", "bash", "busybox", "scratch")
"""Images that the machine's own system stands in for: a system with a shell, or with Python."""
_SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "etc", "proc", "dev", "sys", "tmp", "run")
_TESTS, _LOGS = "/tests", "/logs"
_WITHOUT_EFFECT = ("LABEL", "MAINTAINER", "CMD", "ENTRYPOINT", "EXPOSE", "STOPSIGNAL")
_FETCHES = re.compile(
    r"\b(apt-get|apt|apk|dnf|yum|curl|wget|uvx|uv|pip3? install|npm|npx|git clone|conda)\b"
)


class NeedsContainerError(ProblemSourceError):
    """A sandbox without images can't give the task what it needs."""


@dataclass(frozen=True)
class Place:
    """The workspace that a task starts in, and the variables of its commands."""

    workdir: str
    files: dict[str, bytes]
    executable: frozenset[str]
    variables: dict[str, str]


def make_place(task: Task) -> Place:
    """What the sandbox has to show for this task.

    Raises:
        NeedsContainerError: names the file and the entry that only a container can fulfil.
    """
    _check_config(task)
    _check_test(task)
    place = _Dockerfile(task).place
    variables = {**place.variables, **task.config.environment.env}
    return Place(place.workdir, place.files, place.executable, variables)


def _check_config(task: Task) -> None:
    environment, verifier = task.config.environment, task.config.verifier
    wants = {
        "steps": bool(task.config.steps),
        "verifier.environment": verifier.environment is not None,
        "environment.docker_image": environment.docker_image is not None,
        "environment.os": environment.os.lower() != "linux",
        "environment.gpus": bool(environment.gpus),
        "environment.tpu": environment.tpu is not None,
        "environment.mcp_servers": bool(environment.mcp_servers),
        "environment.skills_dir": environment.skills_dir is not None,
        "environment.healthcheck": environment.healthcheck is not None,
        "environment.network_mode": environment.network_mode == "allowlist",
        "agent.user": task.config.agent.user not in (None, "root", 0),
        "verifier.user": verifier.user not in (None, "root", 0),
    }
    for entry, wanted in wants.items():
        if wanted:
            raise _needs(task.folder / CONFIG, entry)
    for name, value in {**environment.env, **verifier.env}.items():
        if "${" in value:
            raise _needs(task.folder / CONFIG, f"env: {name} is taken from the host")
    for path in task.environment.glob("*compose*.y*ml"):
        raise _needs(path, "several services")


def _check_test(task: Task) -> None:
    """Tests that fetch their tools would fail without a network, and look like the agent's
    failure."""
    path = task.folder / TEST
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if found := _FETCHES.search(line.partition("#")[0]):
            raise _needs(path, f"line {number}: {found.group()} needs a network")


def _needs(path: Path, what: str) -> NeedsContainerError:
    return NeedsContainerError(
        f"{path}: {what}: needs a container, which the sandboxes of this run do not build. Leave "
        f"the task out (problems.exclude), or score it with a problems.evaluator of your own"
    )


@dataclass(frozen=True)
class _Copy:
    """A COPY; ``into`` says that the target is a folder."""

    number: int
    sources: tuple[str, ...]
    target: PurePosixPath
    into: bool


class _Dockerfile:
    """Reads those that only name a base, a working folder, variables and files to copy."""

    def __init__(self, task: Task) -> None:
        self._context = task.environment
        self._path = task.environment / "Dockerfile"
        self._workdir = task.config.environment.workdir or ""
        self._variables: dict[str, str] = {}
        self._copies: list[_Copy] = []
        stages = 0
        for number, word, rest in self._instructions():
            if word == "FROM":
                stages += 1
                self._base(number, rest)
                if stages > 1:
                    raise self._refused(number, "more than one stage")
            elif word == "WORKDIR":
                inside = PurePosixPath(self._workdir or "/") / rest.strip().strip('"')
                self._workdir = str(inside)
            elif word == "ENV":
                self._set(number, rest)
            elif word in ("COPY", "ADD"):
                self._copy(number, rest)
            elif word == "USER" and rest.strip() in ("root", "0"):
                continue
            elif word not in _WITHOUT_EFFECT:
                raise self._refused(number, word)
        self._check_workdir()

    @property
    def place(self) -> Place:
        files: dict[str, bytes] = {}
        executable: set[str] = set()
        for copy in self._copies:
            self._take(copy, files, executable)
        return Place(self._workdir, files, frozenset(executable), self._variables)

    def _instructions(self) -> list[tuple[int, str, str]]:
        found: list[tuple[int, str, str]] = []
        held, began = "", 0
        for number, line in enumerate(read_text(self._path).splitlines(), start=1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            began = began if held else number
            held += text.removesuffix("\\") + " "
            if not text.endswith("\\"):
                word, _, rest = held.strip().partition(" ")
                found.append((began, word.upper(), rest.strip()))
                held = ""
        return found

    def _base(self, number: int, rest: str) -> None:
        image = next((word for word in rest.split() if not word.startswith("--")), "")
        name, _, tag = image.removeprefix("docker.io/").removeprefix("library/").partition(":")
        if name not in _BASES:
            raise self._refused(number, f"FROM {image}")
        version = re.match(r"(\d+)\.(\d+)", tag)
        if name == "python" and version:
            wanted = (int(version[1]), int(version[2]))
            if wanted != sys.version_info[:2]:
                raise self._refused(
                    number, f"FROM {image} (Python here is {sys.version_info[0]}."
                    f"{sys.version_info[1]})"
                )  # fmt: skip

    def _set(self, number: int, rest: str) -> None:
        try:
            words = shlex.split(rest)
        except ValueError as error:
            raise ProblemSourceError(f"{self._path}: line {number}: ENV: {error}") from error
        if words and "=" not in words[0]:
            words = [f"{words[0]}={' '.join(words[1:])}"]
        for word in words:
            name, _, value = word.partition("=")
            if "$" in value:
                raise self._refused(number, f"ENV {name} refers to another variable")
            self._variables[name] = value

    def _copy(self, number: int, rest: str) -> None:
        words = [str(word) for word in json.loads(rest)] if rest[:1] == "[" else rest.split()
        if any(word.startswith(("--from", "http:", "https:", "git@")) for word in words):
            raise self._refused(number, f"COPY {rest}")
        words = [word for word in words if not word.startswith("--")]
        if len(words) < 2:
            raise ProblemSourceError(f"{self._path}: line {number}: COPY needs source and target")
        target = PurePosixPath(self._workdir or "/") / words[-1]
        into = words[-1].endswith(("/", ".")) or len(words) > 2
        self._copies.append(_Copy(number, tuple(words[:-1]), target, into))

    def _take(self, copy: _Copy, files: dict[str, bytes], executable: set[str]) -> None:
        for source in copy.sources:
            path = self._context / source
            if any(sign in source for sign in "*?[$") or ".." in Path(source).parts:
                raise self._refused(copy.number, f"COPY {source}")
            if path.is_dir():
                found, runnable = read_tree(path)
                target = copy.target
            elif path.is_file():
                found, runnable = {path.name: path.read_bytes()}, frozenset()
                if os.access(path, os.X_OK):
                    runnable = frozenset({path.name})
                target = copy.target if copy.into else copy.target.parent
                if not copy.into:
                    found = {copy.target.name: path.read_bytes()}
                    runnable = frozenset({copy.target.name}) if runnable else runnable
            else:
                raise ProblemSourceError(
                    f"{self._path}: line {copy.number}: {path} is not there to be copied"
                )
            for name, content in found.items():
                place = target / name
                if not place.is_relative_to(self._workdir):
                    raise self._refused(copy.number, f"COPY to {place}, outside of the WORKDIR")
                inside = str(place.relative_to(self._workdir))
                files[inside] = content
                if name in runnable:
                    executable.add(inside)

    def _check_workdir(self) -> None:
        path = PurePosixPath(self._workdir or "/")
        entry = f"WORKDIR {path}"
        if not self._workdir or len(path.parts) < 2 or not path.is_absolute():
            raise _needs(self._path, f"{entry}: not a folder of its own")
        here = (sys.prefix, sys.base_prefix)
        hides = any(PurePosixPath(one).is_relative_to(path) for one in here)
        if hides or path.parts[1] in _SYSTEM or str(path).startswith((_TESTS, _LOGS)):
            raise _needs(self._path, f"{entry}: would hide a part of the system")

    def _refused(self, number: int, what: str) -> NeedsContainerError:
        return _needs(self._path, f"line {number}: {what}")
