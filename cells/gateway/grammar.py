"""What binds an output: a JSON schema, or a tool that must be called, for SGLang's grammar.

A schema alone goes as ``json_schema``. Where thinking may come first, or a tool call instead, or a
call is demanded, it is a ``structural_tag``: the formats of xgrammar 0.2.7, which SGLang 0.5.23
hands on as they are. How a policy writes thinking and tool calls is read off what its renderer
writes.
"""

from __future__ import annotations

import json
from typing import Any

from cells.gateway.codec import Codec
from cells.gateway.forms import ChatRequest, Choice, Message, RefusedError, Tool

Format = dict[str, Any]
PROMPT_END = 16
"""Ids at the end of a prompt in which it may begin the thinking."""
_NAME, _KEY, _VALUE, _THOUGHT = "probename", "probekey", "probevalue", "probethought"
_THINK = ("<think>", "</think>")
_JSON_CALL = f'<tool_call>\n{{"name": "{_NAME}", "arguments": {{"{_KEY}": "{_VALUE}"}}}}'
_XML_CALL = f"<tool_call>\n<function={_NAME}>\n<parameter={_KEY}>"


class Grammar:
    """Binds outputs of one policy."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        written = _probe(codec)
        self._json_calls = _JSON_CALL in written
        self._xml_calls = _XML_CALL in written
        self._thinks = _THINK[0] in written and _THOUGHT in written

    def bind(self, request: ChatRequest, prompt: list[int]) -> dict[str, str] | None:
        """The engine's parameters for a request; None when nothing is asked for.

        Args:
            prompt: the newest ids of the prompt, in whose end the thinking can begin.

        Raises:
            RefusedError: 400, a tool is demanded that is not there, or in a policy whose way of
                writing calls is not known here.
        """
        choice, schema = request.tool_choice.choice, request.sampling.json_schema
        if choice is Choice.AUTO and schema is None:
            return None
        if choice is not Choice.AUTO:
            return self._tagged(_some(self._calls(_demanded(request))), prompt)
        assert schema is not None
        answer: Format = {"type": "json_schema", "json_schema": json.loads(schema)}
        if request.tools:
            either = [_some(self._calls(request.tools)), answer]
            return self._tagged({"type": "or", "elements": either}, prompt)
        if self._thinks:
            return self._tagged(answer, prompt)
        return {"json_schema": schema}

    def _tagged(self, body: Format, prompt: list[int]) -> dict[str, str]:
        before = self._thinking(prompt)
        if before is not None:
            body = {"type": "sequence", "elements": [before, body]}
        return {"structural_tag": json.dumps({"type": "structural_tag", "format": body})}

    def _thinking(self, prompt: list[int]) -> Format | None:
        """What may come before the answer: the rest of thinking that the prompt began, or a block
        of it if the policy likes."""
        if not self._thinks:
            return None
        begin, end = _THINK
        text = self._codec.decode(prompt[-PROMPT_END:])
        opened = text.rfind(begin) > text.rfind(end)
        block: Format = {
            "type": "sequence",
            "elements": [
                {
                    "type": "tag",
                    "begin": "" if opened else begin,
                    "content": {"type": "any_text"},
                    "end": end,
                },
                {"type": "regex", "pattern": "\\n{0,2}"},
            ],
        }
        return block if opened else {"type": "optional", "content": block}

    def _calls(self, tools: list[Tool]) -> list[Format]:
        if not (self._json_calls or self._xml_calls):
            raise RefusedError(
                400,
                "unsupported_value",
                "tool_choice: how this policy writes tool calls is not known here, so none can be "
                "demanded, nor a schema beside tools; leave it to the policy",
                param="tool_choice",
            )
        return [self._call(tool["function"]) for tool in tools]

    def _call(self, function: dict[str, Any]) -> Format:
        name, schema = function["name"], function.get("parameters") or {"type": "object"}
        content: Format = {"type": "json_schema", "json_schema": schema}
        if self._json_calls:
            begin = f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": '
            return {"type": "tag", "begin": begin, "content": content, "end": "}\n</tool_call>"}
        content["style"] = "qwen_xml"
        begin, end = f"<tool_call>\n<function={name}>\n", "\n</function>\n</tool_call>"
        return {"type": "tag", "begin": begin, "content": content, "end": end}


def _demanded(request: ChatRequest) -> list[Tool]:
    choice = request.tool_choice
    if choice.choice is Choice.REQUIRED:
        tools = request.tools
    else:
        tools = [tool for tool in request.tools if tool["function"]["name"] == choice.name]
    if not tools:
        what = f"tool {choice.name!r}" if choice.name else "tool"
        raise RefusedError(
            400, "invalid_value", f"tool_choice: no {what} is given", param="tool_choice"
        )
    return tools


def _some(tags: list[Format]) -> Format:
    """One call or more."""
    return {"type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True}


def _probe(codec: Codec) -> str:
    """What the renderer writes of a turn with thinking and a tool call."""
    call = {
        "id": "call_0",
        "type": "function",
        "function": {"name": _NAME, "arguments": json.dumps({_KEY: _VALUE})},
    }
    turn: Message = {
        "role": "assistant",
        "content": "",
        "reasoning_content": _THOUGHT,
        "tool_calls": [call],
    }
    parameters = {"type": "object", "properties": {_KEY: {"type": "string"}}}
    tool = {"type": "function", "function": {"name": _NAME, "parameters": parameters}}
    result: Message = {"role": "tool", "content": "x", "tool_call_id": "call_0"}
    try:
        return codec.decode(codec.render([{"role": "user", "content": "x"}, turn, result], [tool]))
    except ValueError:
        return ""
