"""Requests of the shapes that unmodified clients send; the words are ours."""

from __future__ import annotations

from typing import Any

SESSION = "0b5f7c1e-6a52-4a0e-9f0e-6d3f3c1b2a10"
AGENT = "a1c9"
NESTED = "b7d2"
WRITE_SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
    "required": ["path"],
}


def claude_headers(**more: str) -> dict[str, str]:
    return {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "some-flag-2025-01-01,another-flag-2025-02-02",
        "user-agent": "claude-cli/2.1.220 (external, sdk-cli)",
        "x-stainless-lang": "js",
        "x-claude-code-session-id": SESSION,
        **more,
    }


def claude(messages: list[dict[str, Any]], *, tools: bool = True, **more: Any) -> dict[str, Any]:
    """Claude Code's request: blocks with cache marks, a billing line, fields of its own."""
    mark = {"cache_control": {"type": "ephemeral"}}
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.220.abc; entry=cli;"},
        {"type": "text", "text": "You write code.", **mark},
        {"type": "text", "text": "Work in /work. Be brief.", **mark},
    ]
    body: dict[str, Any] = {
        "model": "some-unknown-model[1m]",
        "messages": messages,
        "system": system,
        "max_tokens": 32000,
        "metadata": {"user_id": f"user_x_account__session_{SESSION}"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "stream": True,
    }
    if tools:
        body["tools"] = [
            {"name": "Write", "description": "Writes.", "input_schema": WRITE_SCHEMA},
            {"name": "Task", "input_schema": {"type": "object"}, "eager_input_streaming": True},
        ]
    return body | more


def claude_title() -> dict[str, Any]:
    schema = {"type": "object", "properties": {"title": {"type": "string"}}}
    return claude(
        [{"role": "user", "content": [{"type": "text", "text": "Name this session: write a.py"}]}],
        tools=False,
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )


def claude_search() -> dict[str, Any]:
    tool = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    return claude([{"role": "user", "content": "Search: sorting"}], tools=False) | {"tools": [tool]}


CLAUDE_SUMMARY = {
    "role": "user",
    "content": [
        {"type": "text", "text": "Answer in text only and call no tools. Summarise all so far."}
    ],
}

CODEX_HEADERS = {
    "user-agent": "codex_exec/0.171.0",
    "originator": "codex_exec",
    "session-id": SESSION,
    "thread-id": SESSION,
    "x-codex-window-id": f"{SESSION}:0",
    "x-codex-turn-metadata": '{"request_kind": "turn"}',
    "accept": "text/event-stream",
}


def codex(items: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Codex' request: instructions, developer and user items, function and custom tools."""
    return {
        "model": "any",
        "instructions": "You are an agent.",
        "input": [
            {
                "type": "message",
                "role": "developer",
                "content": [{"type": "input_text", "text": "Sandbox: none."}],
            },
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "<environment>cwd</environment>"}],
            },
            *items,
        ],
        "tools": [
            {
                "type": "function",
                "name": "exec_command",
                "description": "Runs.",
                "strict": False,
                "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}},
            },
            {
                "type": "custom",
                "name": "apply_patch",
                "description": "Patches.",
                "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
            },
            {
                "type": "namespace",
                "name": "agents",
                "description": "Others.",
                "tools": [{"type": "function", "name": "spawn", "parameters": WRITE_SCHEMA}],
            },
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": None,
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": SESSION,
        "client_metadata": {"x": "y"},
        **more,
    }


def codex_user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def chat_tools(*names: str) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {"name": name, "description": "x", "parameters": WRITE_SCHEMA},
        }
        for name in names
    ]


def opencode(messages: list[dict[str, Any]], *, tools: bool = True) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": "policy",
        "max_tokens": 32000,
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return body | ({"tools": chat_tools("write", "task"), "tool_choice": "auto"} if tools else {})


def qwen(messages: list[dict[str, Any]], *names: str, stream: bool = True) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "policy", "messages": messages, "metadata": {"sessionId": "x"}}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body | ({"tools": chat_tools(*names)} if names else {})
