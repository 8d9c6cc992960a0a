"""Qwen Code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

from tasks.rollout.harnesses.client import MODEL, Client, platform_folder, reading
from tasks.rollout.harnesses.command import Command
from tasks.rollout.harnesses.packages import NpmPackage
from tasks.rollout.sessions import Endpoint

_RESERVED = 33_000
"""It compacts so many tokens before the end of the window it is told of: 20,000 for the summary and
13,000 for what comes until then. 0.15 compacts at a share of the window instead."""


class QwenCode(Client):
    """Speaks chat completions. It runs on a Node of its own."""

    name: ClassVar[str] = "qwen-code"
    versions: ClassVar[tuple[str, ...]] = ("0.24.4", "0.15.10")

    @classmethod
    def package(cls, version: str) -> NpmPackage:
        return NpmPackage(cls.name, version)

    def program(self) -> tuple[str, ...]:
        modules = self.folder / "node_modules"
        node = platform_folder(modules, "node-linux-") / "bin" / "node"
        return (str(node), str(modules / "@qwen-code" / "qwen-code" / "cli.js"))

    def start(self, endpoint: Endpoint, instruction: Path) -> Command:
        settings = instruction.with_name("qwen-settings.json")
        settings.write_text(json.dumps(self._settings()), encoding="utf-8")
        argv = (*self.program(), "--auth-type", "openai", "--yolo")
        argv += ("--max-session-turns", str(self.budget.turns))
        limit_ms = str(int(self.budget.call_s * 1000))
        environment = {
            "OPENAI_BASE_URL": endpoint.base_url,
            "OPENAI_API_KEY": endpoint.api_key,
            "OPENAI_MODEL": MODEL,
            "QWEN_CODE_SYSTEM_SETTINGS_PATH": str(settings),
            "QWEN_CODE_NO_RELAUNCH": "true",
            "QWEN_STREAM_IDLE_TIMEOUT_MS": limit_ms,
            "QWEN_STREAM_MAX_LIFETIME_MS": limit_ms,
        }
        return Command(reading(instruction, argv), environment, (settings,))

    def _settings(self) -> dict[str, object]:
        budget = self.budget
        window = budget.compact_at + _RESERVED
        return {
            "model": {
                "name": MODEL,
                # The older version reads this one, the newer ``autoCompactThreshold``.
                "chatCompression": {"contextPercentageThreshold": budget.compact_at / window},
                "generationConfig": {
                    "contextWindowSize": window,
                    "timeout": int(budget.call_s * 1000),
                    "maxRetries": 10,
                    "samplingParams": {"max_tokens": budget.max_tokens},
                },
            },
            "context": {"autoCompactThreshold": 1},
            "general": {"disableAutoUpdate": True, "enableAutoUpdate": False},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
        }
