"""A task folder of Harbor: ``task.toml`` and what lies beside it.

Read here and not by the package ``harbor``: that needs Python 3.12, and brings the clients of a
dozen clouds for what is one table of settings.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tasks.problems.folders import read_text
from tasks.problems.source import ProblemSourceError

CONFIG = "task.toml"
TEST = "tests/test.sh"


class _Table(BaseModel):
    """The format grows and tools write entries of their own, so what is not known is let be."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)


class Agent(_Table):
    timeout_sec: float | None = Field(default=None, gt=0)
    user: str | int | None = None


class Verifier(_Table):
    timeout_sec: float = Field(default=600.0, gt=0)
    env: dict[str, str] = {}
    user: str | int | None = None
    environment: dict[str, Any] | None = None
    """A container of its own for the tests."""


class Environment(_Table):
    docker_image: str | None = None
    os: str = "linux"
    cpus: float | None = Field(default=None, gt=0)
    memory_mb: int | None = Field(default=None, gt=0)
    storage_mb: int | None = Field(default=None, gt=0)
    gpus: int | None = Field(default=None, ge=0)
    tpu: dict[str, Any] | None = None
    mcp_servers: list[dict[str, Any]] = []
    env: dict[str, str] = {}
    skills_dir: str | None = None
    healthcheck: dict[str, Any] | None = None
    workdir: str | None = None
    network_mode: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _old_sizes(cls, found: Any) -> Any:
        """``memory = "2G"`` is how older tasks write ``memory_mb = 2048``."""
        if not isinstance(found, dict):
            return found
        found = dict(found)
        for name in ("memory", "storage"):
            if name in found:
                found.setdefault(f"{name}_mb", _megabytes(found.pop(name)))
        return found


class Config(_Table):
    """What of ``task.toml`` counts here."""

    agent: Agent = Agent()
    verifier: Verifier = Verifier()
    environment: Environment = Environment()
    steps: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Task:
    """What a task folder holds."""

    folder: Path
    config: Config
    instruction: str

    @property
    def environment(self) -> Path:
        return self.folder / "environment"

    @property
    def tests(self) -> Path:
        return self.folder / "tests"

    @property
    def solution(self) -> Path | None:
        """Folder of the task's own solution, for tasks that have one."""
        folder = self.folder / "solution"
        return folder if (folder / "solve.sh").is_file() else None


def read_task(folder: Path) -> Task:
    """The task in a folder.

    Raises:
        ProblemSourceError: names the file, the entry, and what it must be.
    """
    path = folder / CONFIG
    try:
        config = Config.model_validate(tomllib.loads(read_text(path)))
    except tomllib.TOMLDecodeError as error:
        raise ProblemSourceError(f"{path}: not TOML: {error}") from error
    except ValidationError as error:
        lines = [
            f"{path}: {'.'.join(map(str, one['loc']))}: {one['msg']}, not {one['input']!r:.80}"
            for one in error.errors()
        ]
        raise ProblemSourceError("\n".join(lines)) from error
    instruction = read_text(folder / "instruction.md")
    if not instruction.strip():
        raise ProblemSourceError(f"{folder / 'instruction.md'}: empty")
    read_text(folder / TEST)
    return Task(folder, config, instruction)


def _megabytes(size: Any) -> int:
    units = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}
    text = str(size).strip().upper()
    try:
        return int(float(text[:-1]) * units[text[-1:]])
    except (ValueError, KeyError):
        raise ValueError("must be a size such as 512M or 2G") from None
