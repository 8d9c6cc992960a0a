"""Which recorded call a request goes on from, and the ids of its prompt."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from cells.gateway.canonical import MessageKey, first_difference, message_key, same, tools_key
from cells.gateway.codec import Codec
from cells.gateway.forms import ChatRequest, Message


class Fork(StrEnum):
    """Why a call does not extend the last call of its agent."""

    FRESH_HISTORY = "fresh history"
    HISTORY_EDITED = "history edited"
    EARLIER_CALL = "earlier call"
    TOOLS_CHANGED = "tools changed"
    BRIDGE_REFUSED = "bridge refused"
    PREFIX_BROKEN = "prefix broken"


@dataclass(slots=True, eq=False)
class Node:
    """A call whose answer a client has got: a point that a later request can go on from.

    The ids of its prompt and output, and its messages, are kept as what is new since its parent;
    only the tips of the tree also hold them whole.
    """

    call_id: str
    agent: str
    parent: Node | None
    kept: int
    new_ids: array[int]
    output_ids: array[int]
    messages: tuple[Message, ...]
    """Messages of the request that are not the parent's."""
    reply: Message
    tools: str
    depth: int
    """Messages of the whole history, the reply included."""
    _ids: array[int] | None = field(default=None, repr=False)
    _history: list[Message] | None = field(default=None, repr=False)

    def ids(self) -> array[int]:
        """Prompt and output ids."""
        if self._ids is None:
            ids: array[int] = array("i")
            for node in self._line():
                del ids[node.kept :]
                ids += node.new_ids
                ids += node.output_ids
            self._ids = ids
        return self._ids

    def history(self) -> list[Message]:
        """Messages of the request and the reply."""
        if self._history is None:
            self._history = [
                message for node in self._line() for message in (*node.messages, node.reply)
            ]
        return self._history

    def shrink(self) -> None:
        """Forget what can be put together again; called when a child goes on from here."""
        self._ids = None
        self._history = None

    def _line(self) -> list[Node]:
        line: list[Node] = []
        node: Node | None = self
        while node is not None:
            line.append(node)
            node = node.parent
        return line[::-1]


@dataclass(frozen=True, slots=True)
class Plan:
    """The prompt of a call: the first ``kept`` ids of the parent's prompt and output, then
    ``ids[kept:]``."""

    ids: list[int]
    parent: Node | None
    kept: int
    messages: tuple[Message, ...]
    tools: str
    depth: int
    fork: Fork | None
    detail: str

    @property
    def fork_reason(self) -> str | None:
        if self.fork is None:
            return None
        return f"{self.fork}: {self.detail}" if self.detail else self.fork.value


class Branches:
    """The recorded calls of one execution, findable by what a client echoes of them."""

    def __init__(self) -> None:
        self.last: dict[str, Node] = {}
        """The last call of each agent."""
        self.roots: dict[str, Message] = {}
        """The first message of each agent's first call."""
        self._by_tool_call: dict[str, Node] = {}
        self._by_reply: dict[MessageKey, list[Node]] = {}

    def add(self, node: Node) -> None:
        """Take a call whose answer was delivered."""
        if node.parent is not None:
            node.parent.shrink()
        self.last[node.agent] = node
        self.roots.setdefault(node.agent, node.history()[0])
        for call in node.reply.get("tool_calls", ()):
            self._by_tool_call[call["id"]] = node
        self._by_reply.setdefault(message_key(node.reply), []).append(node)

    def match(self, messages: list[Message], agent: str | None) -> Node | None:
        """The call with the longest history that the messages begin with, its reply included.

        Replies are looked up by the tool-call ids that were issued with them, then by canonical
        content (the newest of the same agent first); either way the whole history must be equal.
        """
        for end in range(len(messages), 0, -1):
            if messages[end - 1]["role"] != "assistant":
                continue
            for node in self._candidates(messages[end - 1], agent):
                if node.depth == end and _begins(messages, node.history()):
                    return node
        return None

    def _candidates(self, message: Message, agent: str | None) -> Iterable[Node]:
        for call in message.get("tool_calls", ()):
            node = self._by_tool_call.get(call["id"])
            if node is not None:
                yield node
                break
        found = self._by_reply.get(message_key(message), ())
        newest = found[::-1]
        yield from (node for node in newest if node.agent == agent)
        yield from (node for node in newest if node.agent != agent)


def plan_call(
    branches: Branches, node: Node | None, request: ChatRequest, agent: str, codec: Codec
) -> Plan:
    """The prompt of a request of ``agent`` that was matched to ``node``.

    Raises:
        ValueError: the renderer can't express the history.
    """
    tools = tools_key(request.tools) if codec.tools_matter else ""
    fork: tuple[Fork, str] | None
    if node is None:
        fork = _unmatched(branches, request.messages, agent)
    else:
        new = request.messages[node.depth :]
        fork = _blocked(node, new, tools)
        if fork is None:
            spliced = _splice(node, new, request, codec)
            if isinstance(spliced, list):
                last = branches.last.get(agent)
                back = last is not None and last is not node
                return Plan(
                    ids=spliced,
                    parent=node,
                    kept=len(node.ids()),
                    messages=tuple(new),
                    tools=tools,
                    depth=len(request.messages) + 1,
                    fork=Fork.EARLIER_CALL if back else None,
                    detail=f"goes on from {node.call_id}" if back else "",
                )
            fork = (spliced, f"after {node.call_id}")
    if agent not in branches.last:
        fork = None
    return Plan(
        ids=codec.render(request.messages, request.tools),
        parent=None,
        kept=0,
        messages=tuple(request.messages),
        tools=tools,
        depth=len(request.messages) + 1,
        fork=fork[0] if fork else None,
        detail=fork[1] if fork else "",
    )


def _splice(node: Node, new: list[Message], request: ChatRequest, codec: Codec) -> list[int] | Fork:
    """Ids that begin with those of ``node``, or why there are none."""
    before = node.ids().tolist()
    cut = len(before) - len(node.output_ids)
    bridged = codec.bridge(before[:cut], before[cut:], new, request.tools)
    if bridged is None:
        return Fork.BRIDGE_REFUSED
    # A bridge may close a turn that was cut off, but only behind what was sampled.
    if bridged[: len(before)] != before:
        return Fork.PREFIX_BROKEN
    return bridged


def _blocked(node: Node, new: list[Message], tools: str) -> tuple[Fork, str] | None:
    for index, message in enumerate(new):
        if message["role"] == "assistant":
            return Fork.HISTORY_EDITED, f"message {node.depth + index} was not sampled here"
    if node.tools != tools:
        return Fork.TOOLS_CHANGED, f"after {node.call_id}"
    return None


def _unmatched(branches: Branches, messages: list[Message], agent: str) -> tuple[Fork, str] | None:
    if not any(message["role"] == "assistant" for message in messages):
        return Fork.FRESH_HISTORY, ""
    last = branches.last.get(agent)
    if last is None:
        return None
    index = first_difference(messages, last.history())
    return Fork.HISTORY_EDITED, f"message {index} differs from {last.call_id}"


def _begins(messages: list[Message], history: list[Message]) -> bool:
    # From the end: that is where histories differ, so a wrong candidate is dropped at once.
    return all(same(messages[index], history[index]) for index in range(len(history) - 1, -1, -1))
