"""The table of known harnesses: by which headers they name their agents, and how else each shows
what a call is for. A new harness is a new entry of ``HARNESSES``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cells.gateway.dialects.fields import object_or_none
from cells.gateway.forms import ChatRequest
from cells.gateway.kinds import (
    BACKGROUND,
    MAIN,
    Origin,
    Rule,
    asks_summary,
    background,
    is_summariser,
    kind_of,
    last_said,
)
from cells.gateway.matching import Branches

Headers = Mapping[str, str]
Check = Callable[[Headers, ChatRequest], str | None]
"""Why a call is one of a kind, or None when it is not."""

_LABEL = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_TEXT_ONLY = re.compile(
    r"text only|only text|no tools|not (?:call|use)\W+(?:\w+\W+){0,3}tools?|without \w*\W*tools?",
    re.IGNORECASE,
)
_TITLE = re.compile(r"\btitles?\b", re.IGNORECASE)
_OPENING = 200
"""Characters of a system prompt that say whose it is."""


@dataclass(frozen=True, slots=True)
class Harness:
    """A harness that names its agents in headers.

    Args:
        session: header that each of its calls has.
        agent: header that names the agent; without it, or equal to the session, the main agent.
        parent: header that names the agent that started this one. Where a harness gives every agent
            a session of its own, only this header tells a sub-agent.
        owns_session: whether a sub-agent's session is its own, and its name.
        background: why a call is nobody's.
        summary: why a call is a compaction.
    """

    name: str
    session: str
    agent: str
    parent: str
    background: Check
    summary: Check
    owns_session: bool = False

    def origin(self, headers: Headers, request: ChatRequest, branches: Branches) -> Origin | None:
        session = headers.get(self.session, "")
        if not _LABEL.fullmatch(session):
            return None
        why = self.background(headers, request)
        if why is not None:
            return background(f"{self.name}: {why}")
        agent, parent = self._agent(headers, session, branches)
        named = f"header {self.agent}" if agent != MAIN else f"header {self.session} alone"
        why = self.summary(headers, request)
        reason = f"{self.name}: {named}" + (f"; {why}" if why else "")
        return Origin(agent, kind_of(agent, why is not None), reason, parent)

    def _agent(self, headers: Headers, session: str, branches: Branches) -> tuple[str, str | None]:
        named, above = headers.get(self.agent, ""), headers.get(self.parent, "")
        sub = _LABEL.fullmatch(named) and (bool(above) if self.owns_session else named != session)
        if not sub:
            return MAIN, None
        # The main agent goes by ``main`` here, whatever its own name for itself.
        return named, above if above != session and above in branches.roots else MAIN


class Loop:
    """The built-in harness, and the way for one's own: ``x-agent`` labels the agent,
    ``x-agent-parent`` the one that started it, ``x-agent-call: summary`` marks a compaction."""

    def origin(self, headers: Headers, request: ChatRequest, branches: Branches) -> Origin | None:
        agent, above = headers.get("x-agent", ""), headers.get("x-agent-parent", "")
        if not _LABEL.fullmatch(agent):
            return None
        kind = kind_of(agent, headers.get("x-agent-call") == "summary")
        parent = None
        if agent not in (MAIN, BACKGROUND):
            parent = above if _LABEL.fullmatch(above) else MAIN
        return Origin(agent, kind, "headers x-agent, x-agent-call", parent)


def _claude_background(headers: Headers, request: ChatRequest) -> str | None:
    if any(kind.startswith("web_search") for kind in request.hosted_tools):
        return "a web search"
    if request.tools or headers.get("x-claude-code-agent-id"):
        return None
    if request.sampling.json_schema is not None:
        return "a title: no tools, an output format"
    turns = sum(message["role"] != "system" for message in request.messages)
    return "a lone question without tools" if turns == 1 else None


def _claude_summary(headers: Headers, request: ChatRequest) -> str | None:
    last = last_said(request)["content"]
    asks = asks_summary(request) and _TEXT_ONLY.search(last) is not None
    return "the last message asks for a summary in text only" if asks else None


def _codex_background(headers: Headers, request: ChatRequest) -> str | None:
    sub = headers.get("x-openai-subagent", "")
    return f"x-openai-subagent: {sub}" if sub.startswith("memory") else None


def _codex_summary(headers: Headers, request: ChatRequest) -> str | None:
    if headers.get("x-openai-subagent") == "compact":
        return "x-openai-subagent: compact"
    turn = object_or_none(headers.get("x-codex-turn-metadata", ""))
    found = turn is not None and turn.get("request_kind") == "compaction"
    return "x-codex-turn-metadata: compaction" if found else None


def _opencode_background(headers: Headers, request: ChatRequest) -> str | None:
    first = request.messages[0]
    if request.tools or first["role"] != "system":
        return None
    # Who is spoken to stands at the beginning; the rules after it mention summaries too.
    found = _TITLE.search(first["content"][:_OPENING])
    return "a title: no tools, a system prompt about titles" if found else None


def _opencode_summary(headers: Headers, request: ChatRequest) -> str | None:
    asks = asks_summary(request) or is_summariser(request)
    return "no tools, asks for a summary" if asks and not request.tools else None


HARNESSES: tuple[Rule, ...] = (
    Loop(),
    Harness(
        name="Claude Code",
        session="x-claude-code-session-id",
        agent="x-claude-code-agent-id",
        parent="x-claude-code-parent-agent-id",
        background=_claude_background,
        summary=_claude_summary,
    ),
    Harness(
        name="Codex",
        session="session-id",
        agent="thread-id",
        parent="x-codex-parent-thread-id",
        background=_codex_background,
        summary=_codex_summary,
    ),
    Harness(
        name="opencode",
        session="x-session-id",
        agent="x-session-id",
        parent="x-parent-session-id",
        background=_opencode_background,
        summary=_opencode_summary,
        owns_session=True,
    ),
    # Qwen Code and mini-swe-agent say nothing in headers: their calls are told by shape.
)
