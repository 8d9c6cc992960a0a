"""How each harness is started."""

from __future__ import annotations

import py_compile
from collections.abc import Callable
from pathlib import Path

from configs.problems import HarnessConfig
from tasks.problems.source import Problem
from tasks.rollout.harnesses import loop
from tasks.rollout.harnesses.claude_code import ClaudeCode
from tasks.rollout.harnesses.client import Budget, Client
from tasks.rollout.harnesses.codex import Codex
from tasks.rollout.harnesses.command import Command, Harness, HarnessError
from tasks.rollout.harnesses.mini_swe_agent import MiniSweAgent
from tasks.rollout.harnesses.opencode import Opencode
from tasks.rollout.harnesses.packages import default_cache
from tasks.rollout.harnesses.qwen_code import QwenCode
from tasks.rollout.sandboxes.sandbox import python_executable
from tasks.rollout.sessions import Endpoint

BUILT_IN = "loop"
CLIENTS: dict[str, type[Client]] = {
    client.name: client for client in (ClaudeCode, Codex, QwenCode, Opencode, MiniSweAgent)
}
NAMES = (BUILT_IN, *CLIENTS)
_CALL_GRACE_S = 30.0
"""The gateway answers within its own limit; what is beyond is for a gateway that is gone."""


def make_harness(
    config: HarnessConfig, call_limit_s: float, folder: Path, context: int | None = None
) -> Harness:
    """The harness that the settings name; a client is installed unless it is there already.

    Args:
        call_limit_s: longest time of a model call.
        folder: where files that all executions share are put.
        context: tokens of the policy's context, which clients are told; by default no more than
            they use.

    Raises:
        HarnessError: there is none of that name or version, or it can't be installed.
    """
    if config.name == BUILT_IN:
        return Loop(config, call_limit_s, folder)
    return make_client(config, call_limit_s, context)


def make_client(config: HarnessConfig, call_limit_s: float, context: int | None) -> Client:
    """As ``make_harness``, for the clients among them."""
    client = find_client(config.name)
    version = client.choose_version(config.version)
    budget = Budget(
        turns=config.turns,
        compact_at=config.context_budget,
        context=context or config.context_budget + config.max_tokens,
        max_tokens=config.max_tokens,
        tool_s=config.tool_timeout_s,
        call_s=call_limit_s + _CALL_GRACE_S,
    )
    return client(client.package(version).install(cache_of(config)), version, budget)


def install_harness(config: HarnessConfig, say: Callable[[str], None]) -> None:
    """Install the client that the settings name, unless it is there or is none.

    Raises:
        HarnessError: there is none of that name or version, or it can't be installed.
    """
    if config.name == BUILT_IN:
        return
    client = find_client(config.name)
    package = client.package(client.choose_version(config.version))
    if not package.is_installed(cache_of(config)):
        say(f"installing {package.name} {package.version} from {package.manager}")
        package.install(cache_of(config))


def find_client(name: str) -> type[Client]:
    """The client of that name.

    Raises:
        HarnessError: there is none.
    """
    if name not in CLIENTS:
        raise HarnessError(f"harness.name {name!r}: there are {', '.join(NAMES)}")
    return CLIENTS[name]


def cache_of(config: HarnessConfig) -> Path:
    """Where clients are installed."""
    return default_cache() if config.folder is None else Path(config.folder).expanduser()


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
            "call-timeout-s": call_limit_s + _CALL_GRACE_S,
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
