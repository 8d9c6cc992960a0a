"""What a call is for and which agent made it: rules of known harnesses first, then its shape."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from cells.gateway.dialects.fields import object_or_none
from cells.gateway.forms import SYSTEM_MARK, ChatRequest, Message
from cells.gateway.matching import Branches, Node
from storage.records import CallKind

MAIN = "main"
BACKGROUND = "background"
_SUMMARY = re.compile(r"summar[iy]|compact|state[ _-]snapshot", re.IGNORECASE)
_TASK_LENGTH = 8
"""Characters that a task must have to be told from a common word."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a call comes from. ``reason`` names the rule that said so; ``parent`` is the agent that
    started a sub-agent."""

    agent: str
    kind: CallKind
    reason: str
    parent: str | None = None


class Rule(Protocol):
    """What is known of one harness."""

    def origin(
        self, headers: Mapping[str, str], request: ChatRequest, branches: Branches
    ) -> Origin | None:
        """Where the call comes from, or None when this is not the harness."""


def by_rules(
    rules: tuple[Rule, ...], headers: Mapping[str, str], request: ChatRequest, branches: Branches
) -> Origin | None:
    """The first answer of the rules."""
    for rule in rules:
        origin = rule.origin(headers, request, branches)
        if origin is not None:
            return origin
    return None


def by_shape(request: ChatRequest, node: Node | None, branches: Branches) -> Origin:
    """The fallback for clients that say nothing: by the history that a request goes on from, and by
    its first message.

    A request that continues an agent's history is that agent's, a summary when its last message
    asks for one. A new history with the opening of a known agent is that agent after a compaction.
    A lone question without tools, beside an agent that has some or under a schema, is background.
    Anything else new is a sub-agent; its parent is the agent that has a tool call open with the
    sub-agent's task in it.
    """
    # Harnesses without tools show the output of commands as the user's words: whatever is in
    # there asks for nothing.
    asks = asks_summary(request) and any(m["role"] == "tool" for m in request.messages)
    known = [agent for agent in branches.roots if agent != BACKGROUND]
    if node is not None:
        agent = node.agent
        parent = None if agent in (MAIN, BACKGROUND) else parent_of(request, branches, agent)
        return Origin(agent, kind_of(agent, asks), "shape: goes on from a recorded call", parent)
    lone = not request.tools and sum(m["role"] == "user" for m in request.messages) == 1
    if lone and request.sampling.json_schema is not None:
        return background("shape: a lone question under a schema")
    if not known:
        return Origin(MAIN, CallKind.MAIN, "shape: first call of the execution")
    for agent in known:
        if request.messages[0] == branches.roots[agent]:
            parent = None if agent == MAIN else parent_of(request, branches, agent)
            return Origin(agent, kind_of(agent, asks), f"shape: opens as {agent} did", parent)
    if not request.tools and (asks_summary(request) or is_summariser(request)):
        return Origin(MAIN, CallKind.MAIN_SUMMARY, "shape: asks for a summary, has no tools")
    if lone:
        return background("shape: a lone question without tools")
    agent = f"sub-{len(known)}"
    parent = parent_of(request, branches, agent)
    return Origin(agent, CallKind.SUB_AGENT, "shape: a new opening", parent)


def kind_of(agent: str, summary: bool) -> CallKind:
    """The kind of an agent's call."""
    if agent == BACKGROUND:
        return CallKind.BACKGROUND
    if agent == MAIN:
        return CallKind.MAIN_SUMMARY if summary else CallKind.MAIN
    return CallKind.SUB_AGENT_SUMMARY if summary else CallKind.SUB_AGENT


def background(reason: str) -> Origin:
    """A call that belongs to no agent."""
    return Origin(BACKGROUND, CallKind.BACKGROUND, reason)


def last_said(request: ChatRequest) -> Message:
    """The last message, reminders of the system behind it left out."""
    said = (m for m in reversed(request.messages) if not m["content"].startswith(SYSTEM_MARK))
    return next(said, request.messages[-1])


def asks_summary(request: ChatRequest) -> bool:
    """Whether the last message asks for a summary. The first words of a user never do: they are the
    task, whatever they say."""
    last = last_said(request)
    told = last["role"] == "user" and _SUMMARY.search(last["content"]) is not None
    return told and any(m["role"] in ("assistant", "tool") for m in request.messages)


def is_summariser(request: ChatRequest) -> bool:
    """Whether the system prompt is that of somebody who writes summaries."""
    first = request.messages[0]
    return first["role"] == "system" and _SUMMARY.search(first["content"]) is not None


def parent_of(request: ChatRequest, branches: Branches, agent: str) -> str:
    """The other agent whose open tool call holds the first words of the user: it gave that task.
    The main agent where none does."""
    first = next((m["content"] for m in request.messages if m["role"] == "user"), "").strip()
    if len(first) >= _TASK_LENGTH:
        for other, node in branches.last.items():
            calls = node.reply.get("tool_calls", ())
            # Its own calls can name what its task names too, such as a folder.
            if other != agent and any(_holds(call, first) for call in calls):
                return other
    return MAIN


def _holds(call: Message, task: str) -> bool:
    arguments = object_or_none(call["function"]["arguments"]) or {}
    texts = (text.strip() for text in arguments.values() if isinstance(text, str))
    return any(len(text) >= _TASK_LENGTH and text in task for text in texts)
