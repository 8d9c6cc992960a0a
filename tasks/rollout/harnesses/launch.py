"""How each harness is started."""

from __future__ import annotations

import py_compile
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from configs.problems import HarnessConfig
from tasks.problems.source import Problem
from tasks.rollout.harnesses import loop
from tasks.rollout.sandboxes.sandbox import python_executable
from tasks.rollout.sessions import Endpoint

NAMES = ("loop",)


class HarnessError(ValueError):
    """No such harness; the text lists those that exist."""


@dataclass(frozen=True)
class Command:
    """What is run inside the sandbox, with the workspace as working folder."""

    argv: tuple[str, ...]
    environment: dict[str, str]
    readable: tuple[Path, ...]
    """What it needs to read besides the system and its workspace."""


class Harness(Protocol):
    """Makes the command of an execution."""

    def command(self, problem: Problem, endpoint: Endpoint, folder: Path) -> Command:
        """The command for a problem; files that it needs are put into ``folder``."""
        ...


def make_harness(config: HarnessConfig, call_limit_s: float, folder: Path) -> Harness:
    """The harness that the settings name.

    Args:
        call_limit_s: longest time of a model call.
        folder: where files that all executions share are put.

    Raises:
        HarnessError: there is none of that name.
    """
    if config.name not in NAMES:
        raise HarnessError(f"harness.name {config.name!r}: there are {', '.join(NAMES)}")
    return Loop(config, call_limit_s, folder)


class Loop:
    """The built-in agent. It is compiled once: compiling takes longer than starting it."""

    def __init__(self, config: HarnessConfig, call_limit_s: float, folder: Path) -> None:
        self._program = folder / "loop.pyc"
        py_compile.compile(
            loop.__file__,
            cfile=str(self._program),
            optimize=2,
            doraise=True,
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )
        self._flags: dict[str, float] = {
            "turns": config.turns,
            "sub-agent-turns": config.sub_agent_turns,
            "sub-agents": config.sub_agents,
            "context-budget": config.context_budget,
            "max-tokens": config.max_tokens,
            "tool-timeout-s": config.tool_timeout_s,
            # The gateway answers within its own limit; this one is for a gateway that is gone.
            "call-timeout-s": call_limit_s + 30,
        }

    def command(self, problem: Problem, endpoint: Endpoint, folder: Path) -> Command:
        instruction = folder / "instruction.txt"
        instruction.write_text(problem.instruction, encoding="utf-8")
        flags = {**self._flags, "tool-delay-s": problem.tool_delay_s}
        argv = [python_executable(), "-I", "-S", str(self._program)]
        argv += ["--instruction-file", str(instruction)]
        for name, value in flags.items():
            argv += [f"--{name}", str(value)]
        return Command(
            argv=tuple(argv),
            environment={
                "OPENAI_BASE_URL": endpoint.base_url,
                "OPENAI_API_KEY": endpoint.api_key,
                "OPENAI_MODEL": "policy",
            },
            readable=(self._program, instruction),
        )
