"""Demonstrations: the scripted agent in the real harness, with the gateway's own rendering."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cells.gateway.codec import Codec
from configs.problems import HarnessConfig
from tasks.problems.specrepo.specification import Specification
from tasks.rollout.harnesses.loop import Reply, Settings, run_agent
from tasks.warm_start.script import Habits, ScriptedAgent
from tasks.warm_start.tokenizer import END_OF_TURN

_DEFINITION = re.compile(r"^def (\w+)", re.MULTILINE)


@dataclass(frozen=True)
class Document:
    """One history of a demonstration. Shapes: ``ids`` [tokens] and ``targets`` [tokens]."""

    ids: npt.NDArray[np.int32]
    targets: npt.NDArray[np.bool_]
    """What the policy shall say; everything else is context."""


@dataclass(frozen=True)
class Demonstration:
    """What one scripted execution left."""

    documents: tuple[Document, ...]
    """In the order in which they began: main, after a compaction, sub-agents."""
    files: dict[str, str]
    calls: int


class MemoryWorkspace:
    """The harness's tools on a dictionary. ``run`` takes a file for plain function definitions,
    which is all that the script writes."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}

    def write(self, path: str, content: str) -> str:
        self.files[path] = content
        return f"ok {path}"

    def append(self, path: str, content: str) -> str:
        self.files[path] = self.files.get(path, "") + content
        return f"ok {path}"

    def run(self, path: str) -> str:
        if path not in self.files:
            return "error FileNotFoundError"
        return "defines " + ", ".join(dict.fromkeys(_DEFINITION.findall(self.files[path])))

    def shell(self, command: str) -> str:
        raise ValueError("the script runs no shell")


class Script(Protocol):
    """What a model says: ``ScriptedAgent`` is one."""

    def turn(self, agent: str) -> str:
        """At a turn of ``agent``."""

    def summary(self, agent: str) -> str:
        """When its context is full."""


class _History:
    """Ids of one history, extended call by call as the gateway does it."""

    def __init__(self) -> None:
        self.prompt: list[int] = []
        self.output: list[int] = []
        self.sampled: list[tuple[int, int]] = []
        self.messages = 0

    def document(self) -> Document:
        targets = np.zeros(len(self.prompt) + len(self.output), np.bool_)
        for start, end in self.sampled:
            targets[start:end] = True
        return Document(np.array([*self.prompt, *self.output], np.int32), targets)


class ScriptedModel:
    """Stands where the model would: renders as the gateway, answers by the script."""

    def __init__(self, codec: Codec, tokenizer: Any, script: Script) -> None:
        self._codec = codec
        self._tokenizer = tokenizer
        self._script = script
        self._current: dict[str, _History] = {}
        self.histories: list[_History] = []
        self.calls = 0

    def __call__(self, messages: list[Any], tools: list[Any], *, agent: str, call: str) -> Reply:
        history = self._current.get(agent)
        fresh = not any(message["role"] == "assistant" for message in messages)
        if history is None or fresh:
            history = self._current[agent] = _History()
            self.histories.append(history)
            history.prompt = self._codec.render(messages, tools)
        else:
            new = messages[history.messages :]
            bridged = self._codec.bridge(history.prompt, history.output, new, tools)
            assert bridged is not None, "the renderer must extend what the script said"
            history.prompt = bridged
        said = self._script.summary(agent) if call == "summary" else self._script.turn(agent)
        history.output = self._tokenizer.encode(said + END_OF_TURN, add_special_tokens=False)
        end = len(history.prompt) + len(history.output)
        history.sampled.append((len(history.prompt), end))
        history.messages = len(messages) + 1
        self.calls += 1
        return Reply(self._message(history, tools), end)

    @property
    def documents(self) -> tuple[Document, ...]:
        """Its histories, in the order in which they began."""
        return tuple(history.document() for history in self.histories)

    def _message(self, history: _History, tools: list[Any]) -> dict[str, Any]:
        parsed = self._codec.parse(history.output, history.prompt, tools)
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
        if parsed.calls:
            message["tool_calls"] = [
                {
                    "id": f"call-{self.calls}-{index}",
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
                for index, (name, arguments) in enumerate(parsed.calls)
            ]
        return message


def demonstrate(
    specification: Specification,
    rng: random.Random,
    habits: Habits,
    settings: Settings,
    codec: Codec,
    tokenizer: Any,
) -> Demonstration:
    """One execution of the scripted agent."""
    workspace = MemoryWorkspace()
    script = ScriptedAgent(specification, rng, habits, settings.sub_agents)
    model = ScriptedModel(codec, tokenizer, script)
    run_agent(specification.text, model, workspace, settings)
    return Demonstration(model.documents, workspace.files, model.calls)


def harness_settings(config: HarnessConfig) -> Settings:
    """The limits of the harness as a run sets them."""
    return Settings(
        turns=config.turns,
        sub_agent_turns=config.sub_agent_turns,
        sub_agents=config.sub_agents,
        context_budget=config.context_budget,
    )
