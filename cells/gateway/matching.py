"""Which recorded call a request goes on from, and the ids of its prompt.

The work of a call follows its new tokens: the messages that were seen before are compared as they
are (which stops at the first difference and reads each text once), only new ones are rendered, and
the ids so far are kept as the JSON text that engines are sent.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain

import orjson

from cells.gateway.canonical import MessageKey, first_difference, message_key, same
from cells.gateway.codec import Codec, name_results
from cells.gateway.forms import ChatRequest, Message


class Fork(StrEnum):
    """Why a call does not extend the last call of its agent."""

    FRESH_HISTORY = "fresh history"
    HISTORY_EDITED = "history edited"
    EARLIER_CALL = "earlier call"
    TOOLS_CHANGED = "tools changed"
    BRIDGE_REFUSED = "bridge refused"
    PREFIX_BROKEN = "prefix broken"
    PART_KEPT = "part kept"
    """The client goes on from the beginning of an answer, such as what it got before its connection
    broke: exactly the ids of that part are spliced."""


@dataclass(slots=True, eq=False)
class Node:
    """A call of which a client has an answer: a point that a later request can go on from.

    The ids of its prompt and output, and its messages, are kept as what is new since its parent;
    only the tips of the tree also hold their history whole.
    """

    call_id: str
    agent: str
    parent: Node | None
    kept: int
    """Ids of the parent's prompt and output that this prompt begins with."""
    new_ids: array[int]
    output_ids: array[int]
    """What was sampled and delivered."""
    messages: tuple[Message, ...]
    """Messages of the request that are not the parent's."""
    reply: Message
    tools: str
    depth: int
    """Messages of the whole history, the reply included."""
    length: int
    """Ids of prompt and output."""
    part: bool = False
    """Whether the output is only the part of an answer that a client kept."""
    unsaid: bool = False
    """Whether the client left the reply out of its history, as some do with an empty one."""
    _encoded: bytes | None = field(default=None, repr=False)
    _history: list[Message] | None = field(default=None, repr=False)

    def parts(self) -> list[bytes]:
        """Prompt and output ids as JSON: numbers with commas between, and between these parts."""
        return [part for node in self._line() if (part := node.part_of_line())]

    def part_of_line(self) -> bytes:
        """The ids that are new since the parent, as JSON."""
        if self._encoded is None:
            self._encoded = encode_ids([*self.new_ids, *self.output_ids])
        return self._encoded

    def keep_encoded(self, new_ids: bytes, output_ids: bytes) -> None:
        """Take the JSON of its ids from who has it."""
        self._encoded = b",".join(part for part in (new_ids, output_ids) if part)

    def ids(self) -> array[int]:
        """Prompt and output ids."""
        ids: array[int] = array("i")
        for node in self._line():
            del ids[node.kept :]
            ids += node.new_ids
            ids += node.output_ids
        return ids

    def history(self) -> list[Message]:
        """Messages of the request and the reply."""
        if self._history is None:
            self._history = [
                message
                for node in self._line()
                for message in (*node.messages, *(() if node.unsaid else (node.reply,)))
            ]
        return self._history

    def remember(self, history: list[Message]) -> None:
        """Take the history as its client spells it."""
        self._history = history

    def shrink(self) -> None:
        """Forget what can be put together again; called when a child goes on from here."""
        self._history = None

    def pack(self) -> None:
        """Forget all that can be put together again."""
        self._history = self._encoded = None

    def _line(self) -> list[Node]:
        line: list[Node] = []
        node: Node | None = self
        while node is not None:
            line.append(node)
            node = node.parent
        return line[::-1]


@dataclass(frozen=True, slots=True)
class Plan:
    """The prompt of a call: all ids of the parent's prompt and output, then ``new_ids``."""

    new_ids: list[int]
    parent: Node | None
    messages: tuple[Message, ...]
    tools: str
    fork: Fork | None
    detail: str

    @property
    def kept(self) -> int:
        """Ids that are the parent's."""
        return self.parent.length if self.parent else 0

    @property
    def tokens(self) -> int:
        """Ids of the whole prompt."""
        return self.kept + len(self.new_ids)

    @property
    def depth(self) -> int:
        """Messages of the history with the reply."""
        return (self.parent.depth if self.parent else 0) + len(self.messages) + 1

    def parts(self) -> list[bytes]:
        """All ids as JSON: numbers with commas between, and between these parts."""
        before = self.parent.parts() if self.parent else []
        return [*before, encode_ids(self.new_ids)]

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
        self._abandoned: dict[str, list[Node]] = {}
        self._by_tool_call: dict[str, Node] = {}
        self._by_reply: dict[MessageKey, list[Node]] = {}

    def add(self, node: Node) -> None:
        """Take a call of which an answer was delivered."""
        if node.parent is not None:
            node.parent.shrink()
        self.last[node.agent] = node
        self.roots.setdefault(node.agent, node.history()[0])
        for call in node.reply.get("tool_calls", ()):
            self._by_tool_call[call["id"]] = node
        self._by_reply.setdefault(message_key(node.reply), []).append(node)

    def add_abandoned(self, node: Node) -> None:
        """Take a call of which a client may have a part; ``node.reply`` says what was sent."""
        if node.reply["content"]:
            self._abandoned.setdefault(node.agent, []).append(node)

    def nodes(self) -> list[Node]:
        """All calls and kept parts of calls, each behind what it goes on from."""
        found: dict[int, Node] = {}
        abandoned = chain.from_iterable(self._abandoned.values())
        replied = chain.from_iterable(self._by_reply.values())
        for node in chain(self.last.values(), abandoned, self._by_tool_call.values(), replied):
            line: list[Node] = []
            one: Node | None = node
            while one is not None and id(one) not in found:
                line.append(one)
                one = one.parent
            found.update((id(one), one) for one in reversed(line))
        return list(found.values())

    def match(self, messages: list[Message], agent: str | None) -> Node | None:
        """The call with the longest history that the messages begin with, its reply included.

        Replies are looked up by the tool-call ids that were issued with them, then by canonical
        content (the newest of the same agent first); either way the whole history must be equal.
        """
        for last in [self.last[agent]] if agent in self.last else self.last.values():
            if is_empty(last.reply) and len(messages) >= last.depth:
                said = last.history()[:-1]
                if not same(messages[len(said)], last.reply) and _begins(messages, said):
                    return leave_out(last)
        for end in range(len(messages), 0, -1):
            if messages[end - 1]["role"] != "assistant":
                continue
            for node in self._candidates(messages[end - 1], agent):
                if node.depth == end and _begins(messages, node.history()):
                    return node
        return None

    def match_part(self, messages: list[Message], agent: str | None, codec: Codec) -> Node | None:
        """The part of a call that the messages go on from, where their last assistant's turn is
        the beginning of an answer that was not delivered whole, or not kept whole."""
        end = len(messages)
        while end and messages[end - 1]["role"] != "assistant":
            end -= 1
        if not end or messages[end - 1].get("tool_calls"):
            return None
        text = messages[end - 1]["content"].strip()
        if not text:
            return None
        for node in self._parts(agent):
            if node.depth != end or not node.reply["content"].strip().startswith(text):
                continue
            if not _begins(messages, node.history()[:-1]):
                continue
            count = codec.cut(node.output_ids.tolist(), node.new_ids.tolist(), text)
            if count is not None:
                return cut_node(node, count, messages[end - 1])
        return None

    def _parts(self, agent: str | None) -> Iterable[Node]:
        agents = [*self._abandoned, *self.last] if agent is None else [agent]
        for one in dict.fromkeys(agents):
            yield from reversed(self._abandoned.get(one, ()))
            if one in self.last:
                yield self.last[one]

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


def cut_node(node: Node, count: int, reply: Message) -> Node:
    """A call with only the first ``count`` ids of its output, as which a client kept ``reply``."""
    return replace(
        node,
        output_ids=node.output_ids[:count],
        reply=reply,
        length=node.length - len(node.output_ids) + count,
        part=True,
        _encoded=None,
        _history=None,
    )


def leave_out(node: Node) -> Node:
    """A call of which the client does not repeat the reply."""
    return replace(node, depth=node.depth - 1, unsaid=True, _history=None)


def is_empty(reply: Message) -> bool:
    """Whether clients may leave this reply out of their history."""
    return not reply["content"].strip() and not reply.get("tool_calls")


def plan_call(
    branches: Branches,
    node: Node | None,
    request: ChatRequest,
    agent: str,
    tools: str,
    codec: Codec,
) -> Plan:
    """The prompt of a request of ``agent`` that was matched to ``node``.

    Args:
        tools: ``tools_key`` of the request's tools.

    Raises:
        ValueError: the renderer can't express the history.
    """
    if not codec.tools_matter:
        tools = ""
    fork: tuple[Fork, str] | None
    if node is None:
        fork = _unmatched(branches, request.messages, agent)
    else:
        new = request.messages[node.depth :]
        fork = _blocked(node, new, tools)
        if fork is None:
            spliced = _splice(node, new, request, codec)
            if isinstance(spliced, list):
                fork = _aside(branches, node, agent)
                return Plan(
                    new_ids=spliced,
                    parent=node,
                    messages=tuple(new),
                    tools=tools,
                    fork=fork[0] if fork else None,
                    detail=fork[1] if fork else "",
                )
            fork = spliced
    if agent not in branches.last:
        fork = None
    return Plan(
        new_ids=codec.render(request.messages, request.tools),
        parent=None,
        messages=tuple(request.messages),
        tools=tools,
        fork=fork[0] if fork else None,
        detail=fork[1] if fork else "",
    )


def encode_ids(ids: Sequence[int]) -> bytes:
    """Ids as JSON: numbers with commas between."""
    return orjson.dumps(ids)[1:-1]


def _splice(
    node: Node, new: list[Message], request: ChatRequest, codec: Codec
) -> list[int] | tuple[Fork, str]:
    """Ids behind those of ``node``, or why there are none.

    A bridge looks at the turn that it closes, which begins in the newest part of the prompt: so it
    is given that part only.
    """
    prompt, output = node.new_ids.tolist(), node.output_ids.tolist()
    bridged = codec.bridge(prompt, output, name_results(new, [node.reply]), request.tools)
    if bridged is None:
        return Fork.BRIDGE_REFUSED, f"{codec.refusal(new)}, after {node.call_id}"
    # A bridge may close a turn that was cut off, but only behind what was sampled.
    before = prompt + output
    if bridged[: len(before)] != before:
        return Fork.PREFIX_BROKEN, f"after {node.call_id}"
    return bridged[len(before) :]


def _aside(branches: Branches, node: Node, agent: str) -> tuple[Fork, str] | None:
    """Why a call that extends ``node`` does not extend the last call of its agent."""
    if node.part:
        return Fork.PART_KEPT, f"{len(node.output_ids)} ids of {node.call_id}"
    last = branches.last.get(agent)
    if last is not None and last.call_id != node.call_id:
        return Fork.EARLIER_CALL, f"goes on from {node.call_id}"
    return None


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
    last = len(history) - 1
    if last >= 0 and messages[:last] == history[:last]:  # as this client spelled it before
        return same(messages[last], history[last])
    # From the end: that is where histories differ, so a wrong candidate is dropped at once.
    return all(same(messages[index], history[index]) for index in range(len(history) - 1, -1, -1))
