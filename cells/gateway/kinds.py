"""What a call is for and which agent made it: a table of rules, first answer wins."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cells.gateway.forms import ChatRequest, Message
from cells.gateway.matching import Branches, Node
from storage.records import CallKind

MAIN = "main"
_LABEL = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_SUMMARY = re.compile(r"summar|compact|state[ _-]snapshot", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a call comes from. ``reason`` names the rule that said so."""

    agent: str
    kind: CallKind
    reason: str


HeaderRule = Callable[[Mapping[str, str]], Origin | None]


def by_agent_header(headers: Mapping[str, str]) -> Origin | None:
    """``x-agent`` labels the agent, ``x-agent-call: summary`` marks a compaction: what the loop
    harness sends."""
    agent = headers.get("x-agent", "")
    if not _LABEL.fullmatch(agent):
        return None
    summary = headers.get("x-agent-call") == "summary"
    return Origin(agent, _kind(agent, summary), "headers x-agent, x-agent-call")


HEADER_RULES: tuple[HeaderRule, ...] = (by_agent_header,)


def by_headers(headers: Mapping[str, str]) -> Origin | None:
    """The first answer of the header rules."""
    for rule in HEADER_RULES:
        origin = rule(headers)
        if origin is not None:
            return origin
    return None


def by_shape(request: ChatRequest, node: Node | None, branches: Branches) -> Origin:
    """The fallback for clients that say nothing: by the history that a request goes on from, and by
    its first message.

    A request that continues an agent's history is that agent's, a summary when its last message
    asks for one. A new history with the opening of a known agent is that agent after a compaction.
    A lone question without tools beside an agent that has some is background. Anything else new is
    a sub-agent.
    """
    last = request.messages[-1]
    asks = last["role"] in ("user", "system") and _SUMMARY.search(last["content"]) is not None
    if node is not None:
        return Origin(node.agent, _kind(node.agent, asks), "shape: goes on from a recorded call")
    if not branches.last:
        return Origin(MAIN, CallKind.MAIN, "shape: first call of the execution")
    opening = request.messages[0]
    for agent, root in branches.roots.items():
        if _opens_alike(opening, root):
            return Origin(agent, _kind(agent, asks), f"shape: opens as {agent} did")
    if not request.tools and asks:
        return Origin(MAIN, CallKind.MAIN_SUMMARY, "shape: asks for a summary, has no tools")
    if not request.tools and sum(m["role"] == "user" for m in request.messages) == 1:
        return Origin("background", CallKind.BACKGROUND, "shape: a lone question without tools")
    agent = f"sub-{len(branches.roots)}"
    return Origin(agent, CallKind.SUB_AGENT, "shape: a new opening")


def _kind(agent: str, summary: bool) -> CallKind:
    if agent == "background":
        return CallKind.BACKGROUND
    if agent == MAIN:
        return CallKind.MAIN_SUMMARY if summary else CallKind.MAIN
    return CallKind.SUB_AGENT_SUMMARY if summary else CallKind.SUB_AGENT


def _opens_alike(one: Message, other: Message) -> bool:
    return bool(one["role"] == "system" and one == other)
