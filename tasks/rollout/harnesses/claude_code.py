"""Claude Code."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from tasks.rollout.harnesses.client import MODEL, Client, platform_folder, reading
from tasks.rollout.harnesses.command import Command
from tasks.rollout.harnesses.packages import NpmPackage
from tasks.rollout.sessions import Endpoint

_SHORTEST_WINDOW = 100_000
"""It takes no shorter one from its environment, only a share of it."""
_RESERVED = 13_000
"""It compacts so many tokens, and the room for one reply, before the end of the window it is told
of, or at the share of the window without that room that it is told of, whichever is less."""
_MOST_RESERVED_FOR_REPLY = 20_000
_DAY_MS = 86_400_000


class ClaudeCode(Client):
    """Speaks Anthropic's messages. Its turns are counted for the main agent only."""

    name: ClassVar[str] = "claude-code"
    versions: ClassVar[tuple[str, ...]] = ("2.1.220", "2.1.332")

    @classmethod
    def package(cls, version: str) -> NpmPackage:
        return NpmPackage(cls.name, version)

    def program(self) -> tuple[str, ...]:
        modules = self.folder / "node_modules"
        return (str(platform_folder(modules, "@anthropic-ai/claude-code-linux-") / "claude"),)

    def start(self, endpoint: Endpoint, instruction: Path) -> Command:
        argv = (*self.program(), "--print", "--dangerously-skip-permissions", "--model", MODEL)
        argv += ("--max-turns", str(self.budget.turns))
        return Command(reading(instruction, argv), self._environment(endpoint), ())

    def _environment(self, endpoint: Endpoint) -> dict[str, str]:
        budget = self.budget
        reply = min(budget.max_tokens, _MOST_RESERVED_FOR_REPLY)
        window = max(budget.compact_at + reply + _RESERVED, _SHORTEST_WINDOW)
        share = 100 * budget.compact_at / (window - reply)
        tool_ms = str(int(budget.tool_s * 1000))
        call_ms = str(int(budget.call_s * 1000))
        return {
            "ANTHROPIC_BASE_URL": endpoint.base_url.removesuffix("/v1"),
            "ANTHROPIC_AUTH_TOKEN": endpoint.api_key,
            # One policy plays every part.
            "ANTHROPIC_DEFAULT_OPUS_MODEL": MODEL,
            "ANTHROPIC_DEFAULT_SONNET_MODEL": MODEL,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
            "CLAUDE_CODE_SUBAGENT_MODEL": MODEL,
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(window),
            "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE": f"{share:.3f}",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(budget.max_tokens),
            "BASH_DEFAULT_TIMEOUT_MS": tool_ms,
            "BASH_MAX_TIMEOUT_MS": tool_ms,
            # It would give up a call that waits for a cell. The gateway ends calls by itself.
            "API_TIMEOUT_MS": call_ms,
            "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(_DAY_MS),
            "API_FORCE_IDLE_TIMEOUT": "0",
            # It refuses to skip permissions as root outside of a sandbox.
            "IS_SANDBOX": "1",
            # There is no network, and a prompt must not change from call to call.
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_AUTOUPDATER": "1",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        }
