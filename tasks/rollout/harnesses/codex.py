"""Codex."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

from tasks.rollout.harnesses.client import MODEL, Client, platform_folder, reading
from tasks.rollout.harnesses.command import Command, HarnessError
from tasks.rollout.harnesses.packages import NpmPackage
from tasks.rollout.sessions import Endpoint

_PROVIDER = "gyre"
_CONNECTIONS = 10
"""Tries of a call that can't be made: the gateway itself waits for cells, this is for a new one."""
_STREAMS = 5
"""Tries of a stream that breaks."""


class Codex(Client):
    """Speaks OpenAI's responses. It can be told neither a number of turns, nor the most tokens of a
    reply, nor the time of a command: the context and the limits of the execution end those. A reply
    that is cut off at the end of the context ends it."""

    name: ClassVar[str] = "codex"
    versions: ClassVar[tuple[str, ...]] = ("0.171.0",)

    @classmethod
    def package(cls, version: str) -> NpmPackage:
        return NpmPackage(cls.name, version)

    def program(self) -> tuple[str, ...]:
        package = platform_folder(self.folder / "node_modules", "@openai/codex-linux-")
        found = sorted(package.glob("vendor/*/bin/codex")) or sorted(
            package.glob("vendor/*/codex/codex")
        )
        if not found:
            raise HarnessError(f"{package}: there is no program codex")
        return (str(found[0]),)

    def start(self, endpoint: Endpoint, instruction: Path) -> Command:
        provider = f"model_providers.{_PROVIDER}"
        settings = {
            "model": MODEL,
            "model_provider": _PROVIDER,
            "model_context_window": self.budget.context,
            "model_auto_compact_token_limit": self.budget.compact_at,
            f"{provider}.name": _PROVIDER,
            f"{provider}.base_url": endpoint.base_url,
            f"{provider}.env_key": "OPENAI_API_KEY",
            f"{provider}.wire_api": "responses",
            f"{provider}.stream_idle_timeout_ms": int(self.budget.call_s * 1000),
            f"{provider}.request_max_retries": _CONNECTIONS,
            f"{provider}.stream_max_retries": _STREAMS,
            "web_search": "disabled",
            "analytics.enabled": False,
            "check_for_update_on_startup": False,
        }
        argv = [*self.program(), "exec", "--skip-git-repo-check", "--color", "never"]
        argv.append("--dangerously-bypass-approvals-and-sandbox")
        for name, value in settings.items():
            argv += ["--config", f"{name}={json.dumps(value)}"]
        environment = {"OPENAI_API_KEY": endpoint.api_key}
        return Command(reading(instruction, (*argv, "-")), environment, ())
