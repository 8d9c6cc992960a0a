"""opencode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

from tasks.rollout.harnesses.client import MODEL, Client, platform_folder, reading
from tasks.rollout.harnesses.command import Command
from tasks.rollout.harnesses.packages import NpmPackage
from tasks.rollout.sessions import Endpoint

_PROVIDER = "gyre"


class Opencode(Client):
    """Speaks chat completions. It compacts when the context that it is told of has no room for
    another reply."""

    name: ClassVar[str] = "opencode"
    versions: ClassVar[tuple[str, ...]] = ("1.18.33",)

    @classmethod
    def package(cls, version: str) -> NpmPackage:
        return NpmPackage(cls.name, version)

    def program(self) -> tuple[str, ...]:
        package = platform_folder(self.folder / "node_modules", "opencode-linux-")
        return (str(package / "bin" / "opencode"),)

    def start(self, endpoint: Endpoint, instruction: Path) -> Command:
        argv = (*self.program(), "run", "--model", f"{_PROVIDER}/{MODEL}")
        tool_ms = str(int(self.budget.tool_s * 1000))
        environment = {
            "OPENCODE_CONFIG_CONTENT": json.dumps(self._settings(endpoint)),
            "OPENCODE_EXPERIMENTAL_BASH_DEFAULT_TIMEOUT_MS": tool_ms,
            # There is no network to fetch any of these from.
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
        }
        return Command(reading(instruction, argv), environment, ())

    def _settings(self, endpoint: Endpoint) -> dict[str, object]:
        budget = self.budget
        policy = {
            "name": MODEL,
            "tool_call": True,
            "limit": {
                "context": budget.compact_at + budget.max_tokens,
                "output": budget.max_tokens,
            },
        }
        options = {"baseURL": endpoint.base_url, "apiKey": endpoint.api_key, "timeout": False}
        return {
            "model": f"{_PROVIDER}/{MODEL}",
            "small_model": f"{_PROVIDER}/{MODEL}",
            "provider": {
                _PROVIDER: {
                    "npm": "@ai-sdk/openai-compatible",
                    "name": _PROVIDER,
                    "options": options,
                    "models": {MODEL: policy},
                }
            },
            "permission": {"*": "allow"},
            "agent": {"build": {"steps": budget.turns}},
            "share": "disabled",
            "autoupdate": False,
        }
