"""mini-swe-agent."""

from __future__ import annotations

import math
from pathlib import Path
from typing import ClassVar

from tasks.rollout.harnesses.client import MODEL, Client
from tasks.rollout.harnesses.command import Command
from tasks.rollout.harnesses.packages import PythonPackage
from tasks.rollout.sessions import Endpoint

_MODULE = "minisweagent.run.mini"
_OFFLINE = {
    "MSWEA_CONFIGURED": "true",
    "MSWEA_SILENT_STARTUP": "1",
    # A table of prices that it would fetch, and prices that a policy does not have.
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "MSWEA_COST_TRACKING": "ignore_errors",
}
_FIRST_RUN = (
    f"import os; os.environ.update({_OFFLINE!r}); import {_MODULE}; "
    f"import minisweagent.models.litellm_model, minisweagent.environments.local"
)
_START = (
    "import sys; from pathlib import Path; from minisweagent.run.mini import app; "
    "sys.argv = ['mini', *sys.argv[2:], '--task', Path(sys.argv[1]).read_text()]; app()"
)
"""Its own entry point. It takes the task as an argument only, and instructions can be longer than
one may be."""


class MiniSweAgent(Client):
    """Speaks chat completions, one agent, one tool. It never compacts: it ends when the context is
    full."""

    name: ClassVar[str] = "mini-swe-agent"
    versions: ClassVar[tuple[str, ...]] = ("2.4.6",)

    @classmethod
    def package(cls, version: str) -> PythonPackage:
        return PythonPackage(cls.name, version, _FIRST_RUN)

    def program(self) -> tuple[str, ...]:
        return (str(self.folder / "bin" / "python"), "-m", _MODULE)

    def version_argv(self) -> tuple[str, ...]:
        print_it = "from minisweagent import __version__; print(__version__)"
        return (str(self.folder / "bin" / "python"), "-c", print_it)

    def start(self, endpoint: Endpoint, instruction: Path) -> Command:
        budget = self.budget
        settings = {
            "agent.step_limit": budget.turns,
            "agent.cost_limit": 0,
            "environment.timeout": math.ceil(budget.tool_s),
            "model.model_kwargs.max_tokens": budget.max_tokens,
            "model.model_kwargs.timeout": budget.call_s,
        }
        argv = [str(self.folder / "bin" / "python"), "-c", _START, str(instruction)]
        argv += ["--model", f"openai/{MODEL}", "--yolo", "--exit-immediately"]
        argv += ["--config", "mini.yaml"]
        for name, value in settings.items():
            argv += ["--config", f"{name}={value}"]
        environment = {
            **_OFFLINE,
            "OPENAI_BASE_URL": endpoint.base_url,
            "OPENAI_API_BASE": endpoint.base_url,
            "OPENAI_API_KEY": endpoint.api_key,
        }
        return Command(tuple(argv), environment, ())
