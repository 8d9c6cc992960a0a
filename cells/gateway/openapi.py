"""The OpenAPI document of what clients see, made of the routes' own bounds."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from cells.gateway.dialects.fields import SEEDS, STOP_LENGTH, STOPS

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_OBJECT: Schema = {"type": "object"}
_ROLES: Schema = {"type": "string", "enum": ["system", "developer", "user", "assistant", "tool"]}


def serve(request: Request) -> Response:
    """``GET /openapi.json``."""
    return Response(_DOCUMENT, media_type="application/json")


def document() -> Schema:
    """Paths, the fields of requests that are read, and the forms of answers and errors."""
    base = "/e/{execution_id}"
    chat = _operation("chat", "A chat completion.", _CHAT, _CHAT_ANSWER, "OpenAIError", True)
    responses = _operation(
        "responses", "A response.", _RESPONSES, _RESPONSES_ANSWER, "OpenAIError", True
    )
    counted = _operation(
        "responsesCount", "Tokens of a response's prompt.", _RESPONSES, _COUNTED, "OpenAIError"
    )
    messages = _operation(
        "messages", "A message.", _MESSAGES, _MESSAGES_ANSWER, "AnthropicError", True
    )
    tokens = _operation(
        "messagesCount", "Tokens of a message's prompt.", _MESSAGES, _COUNTED, "AnthropicError"
    )
    models = _operation("models", "The models; any name is served.", None, _MODELS, "Error")
    model = _operation("model", "One model.", None, _MODEL, "Error")
    named = {"name": "model", "in": "path", "required": True, "schema": {**_TEXT, "minLength": 1}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Gyre gateway", "version": "1"},
        "security": [{"bearer": []}, {"key": []}],
        "paths": {
            f"{base}/v1/chat/completions": _path({"post": chat}),
            f"{base}/v1/responses": _path({"post": responses}),
            f"{base}/v1/responses/input_tokens": _path({"post": counted}),
            f"{base}/v1/messages": _path({"post": messages}),
            f"{base}/v1/messages/count_tokens": _path({"post": tokens}),
            f"{base}/v1/models": _path({"get": models}),
            f"{base}/v1/models/{{model}}": _path({"get": model}, named),
        },
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
            "schemas": {
                "OpenAIError": _OPENAI_ERROR,
                "AnthropicError": _ANTHROPIC_ERROR,
                "Error": {"anyOf": [_OPENAI_ERROR, _ANTHROPIC_ERROR]},
            },
        },
    }


def _path(operations: Schema, *more: Schema) -> Schema:
    execution = {"name": "execution_id", "in": "path", "required": True, "schema": _TEXT}
    return {"parameters": [execution, *more], **operations}


def _operation(
    name: str,
    summary: str,
    body: Schema | None,
    answer: Schema,
    error: str,
    streamed: bool = False,
) -> Schema:
    content = {"application/json": {"schema": answer}}
    if streamed:
        content["text/event-stream"] = {"schema": _EVENT}
    failed = {"application/json": {"schema": {"$ref": f"#/components/schemas/{error}"}}}
    made: Schema = {
        "operationId": name,
        "summary": summary,
        "responses": {
            "200": {"description": "The answer.", "content": content},
            "4XX": {"description": "The request can't be served.", "content": failed},
            "503": {"description": "Try again after the given time.", "content": failed},
            "529": {"description": "The same, in Anthropic's words.", "content": failed},
        },
    }
    if body is not None:
        made["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": body}},
        }
    return made


def _list(items: Schema, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least}


def _maybe(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _fields(required: list[str], **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": required}


_TEMPERATURE = _maybe({"type": "number", "minimum": 0, "maximum": 10})
_TOP_P = _maybe({"type": "number", "exclusiveMinimum": 0, "maximum": 1})
_LENGTH = _maybe({"type": "integer", "minimum": 1, "maximum": 1 << 31})
_SEED = _maybe({"type": "integer", "minimum": -SEEDS, "maximum": SEEDS - 1})
_STOP_LIST: Schema = {
    "type": "array",
    "items": {"type": "string", "minLength": 1, "maxLength": STOP_LENGTH},
    "maxItems": STOPS,
}
_STOP = _maybe({"anyOf": [_STOP_LIST["items"], _STOP_LIST]})
_EVENT = _fields(["data"], data=_TEXT, event=_TEXT)
_CONTENT: Schema = {
    "anyOf": [
        _TEXT,
        _list(_fields(["type", "text"], type={"const": "text"}, text=_TEXT)),
    ]
}
_FUNCTION = _fields(["name"], name={**_TEXT, "minLength": 1}, description=_TEXT, parameters=_OBJECT)
_CHAT_CALL = _fields(
    ["function"],
    id=_TEXT,
    type={"const": "function"},
    function=_fields(["name", "arguments"], name=_TEXT, arguments=_TEXT),
)
_CHAT = _fields(
    ["messages"],
    model=_TEXT,
    messages=_list(
        _fields(
            ["role", "content"],
            role=_ROLES,
            content=_CONTENT,
            reasoning_content=_TEXT,
            tool_calls=_list(_CHAT_CALL),
            tool_call_id=_TEXT,
        ),
        1,
    ),
    tools=_maybe(
        _list(_fields(["type", "function"], type={"const": "function"}, function=_FUNCTION))
    ),
    tool_choice={"enum": ["auto", "none"]},
    stream={"type": "boolean"},
    stream_options=_maybe(_fields([], include_usage={"type": "boolean"})),
    max_tokens=_LENGTH,
    max_completion_tokens=_LENGTH,
    temperature=_TEMPERATURE,
    top_p=_TOP_P,
    stop=_STOP,
    seed=_SEED,
)
_INPUT_ITEM: Schema = {
    "anyOf": [
        _fields(
            ["role", "content"],
            type={"const": "message"},
            role={"type": "string", "enum": ["system", "developer", "user", "assistant"]},
            content={
                "anyOf": [
                    _TEXT,
                    _list(
                        _fields(
                            ["type", "text"],
                            type={"enum": ["input_text", "output_text"]},
                            text=_TEXT,
                        )
                    ),
                ]
            },
        ),
        _fields(
            ["type", "call_id", "name", "arguments"],
            type={"const": "function_call"},
            call_id=_TEXT,
            name=_TEXT,
            arguments=_TEXT,
        ),
        _fields(
            ["type", "call_id", "output"],
            type={"enum": ["function_call_output", "custom_tool_call_output"]},
            call_id=_TEXT,
            output=_TEXT,
        ),
        _fields(
            ["type", "call_id", "name", "input"],
            type={"const": "custom_tool_call"},
            call_id=_TEXT,
            name=_TEXT,
            input=_TEXT,
        ),
        _fields(
            ["type", "summary"],
            type={"const": "reasoning"},
            summary=_list(_fields(["type", "text"], type={"const": "summary_text"}, text=_TEXT)),
        ),
    ]
}
_RESPONSES = _fields(
    ["input"],
    model=_TEXT,
    input={"anyOf": [_TEXT, _list(_INPUT_ITEM, 1)]},
    instructions=_maybe(_TEXT),
    tools=_maybe(
        _list(
            _fields(
                ["type", "name"],
                type={"enum": ["function", "custom"]},
                name={**_TEXT, "minLength": 1},
                description=_TEXT,
                parameters=_OBJECT,
            )
        )
    ),
    tool_choice={"enum": ["auto", "none"]},
    stream={"type": "boolean"},
    store={"type": "boolean"},
    max_output_tokens=_LENGTH,
    temperature=_TEMPERATURE,
    top_p=_TOP_P,
)
_BLOCK: Schema = {
    "anyOf": [
        _fields(["type", "text"], type={"const": "text"}, text=_TEXT),
        _fields(
            ["type", "tool_use_id", "content"],
            type={"const": "tool_result"},
            tool_use_id=_TEXT,
            content=_CONTENT,
        ),
    ]
}
_OWN_BLOCK: Schema = {
    "anyOf": [
        _fields(["type", "text"], type={"const": "text"}, text=_TEXT),
        _fields(["type", "thinking"], type={"const": "thinking"}, thinking=_TEXT, signature=_TEXT),
        _fields(
            ["type", "id", "name", "input"],
            type={"const": "tool_use"},
            id=_TEXT,
            name=_TEXT,
            input=_OBJECT,
        ),
    ]
}
_MESSAGES = _fields(
    ["messages"],
    model=_TEXT,
    max_tokens=_LENGTH,
    system=_maybe(_CONTENT),
    messages=_list(
        {
            "anyOf": [
                _fields(
                    ["role", "content"],
                    role={"const": "user"},
                    content={"anyOf": [_TEXT, _list(_BLOCK, 1)]},
                ),
                _fields(
                    ["role", "content"],
                    role={"const": "assistant"},
                    content={"anyOf": [_TEXT, _list(_OWN_BLOCK)]},
                ),
            ]
        },
        1,
    ),
    tools=_maybe(
        _list(
            _fields(
                ["name", "input_schema"],
                name={**_TEXT, "minLength": 1},
                description=_TEXT,
                input_schema=_OBJECT,
            )
        )
    ),
    tool_choice=_fields(["type"], type={"enum": ["auto", "none"]}),
    thinking=_fields(["type"], type={"enum": ["enabled", "adaptive", "disabled"]}),
    stream={"type": "boolean"},
    temperature=_TEMPERATURE,
    top_p=_TOP_P,
    stop_sequences=_maybe(_STOP_LIST),
)
_COUNT: Schema = {"type": "integer", "minimum": 0}
_CHAT_ANSWER = _fields(
    ["id", "object", "created", "model", "choices", "usage"],
    id=_TEXT,
    object={"const": "chat.completion"},
    created=_COUNT,
    model=_TEXT,
    choices={**_list(_OBJECT, 1), "maxItems": 1},
    usage=_fields(
        ["prompt_tokens", "completion_tokens", "total_tokens"],
        prompt_tokens=_COUNT,
        completion_tokens=_COUNT,
        total_tokens=_COUNT,
    ),
)
_RESPONSES_ANSWER = _fields(
    ["id", "object", "created_at", "status", "model", "output", "usage"],
    id=_TEXT,
    object={"const": "response"},
    created_at=_COUNT,
    status={"enum": ["completed", "incomplete"]},
    model=_TEXT,
    output=_list(_fields(["id", "type"], id=_TEXT, type=_TEXT)),
    usage=_fields(["input_tokens", "output_tokens"], input_tokens=_COUNT, output_tokens=_COUNT),
)
_MESSAGES_ANSWER = _fields(
    ["id", "type", "role", "model", "content", "stop_reason", "usage"],
    id=_TEXT,
    type={"const": "message"},
    role={"const": "assistant"},
    model=_TEXT,
    content=_list(_OWN_BLOCK),
    stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
    usage=_fields(["input_tokens", "output_tokens"], input_tokens=_COUNT, output_tokens=_COUNT),
)
_COUNTED = _fields(["input_tokens"], input_tokens=_COUNT)
_MODEL = _fields(["id"], id=_TEXT)
_MODELS = _fields(["data"], data=_list(_MODEL, 1))
_OPENAI_ERROR = _fields(
    ["error"],
    error=_fields(
        ["message", "type", "code"], message=_TEXT, type=_TEXT, param=_maybe(_TEXT), code=_TEXT
    ),
)
_ANTHROPIC_ERROR = _fields(
    ["type", "error"],
    type={"const": "error"},
    error=_fields(["type", "message"], type=_TEXT, message=_TEXT),
)
_DOCUMENT = orjson.dumps(document())
