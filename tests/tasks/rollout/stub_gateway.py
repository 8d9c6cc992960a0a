"""A gateway of the tests: admin calls of the contract, and scripted chat completions."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from cells.daemon import Registration
from storage.layout import RunLayout
from storage.objects import Store

Message = dict[str, Any]
Policy = Callable[[list[Message], dict[str, str]], Message]


def call(name: str, **arguments: object) -> Message:
    """An assistant message with one tool call."""
    return calls((name, json.dumps(arguments)))


def calls(*pairs: tuple[str, str]) -> Message:
    tools = [
        {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": text}}
        for number, (name, text) in enumerate(pairs)
    ]
    return {"role": "assistant", "content": None, "tool_calls": tools}


def scripted(*messages: Message) -> Policy:
    """A policy that gives these replies in order, and the last one for ever."""
    left = list(messages)
    return lambda history, headers: left.pop(0) if len(left) > 1 else left[0]


class StubGateway:
    """Serves until closed. ``policy`` and ``failures`` may be changed while it runs.

    Attributes:
        policy: makes the reply of every call.
        failures: (status, headers) that the next calls are refused with; 0 drops the connection.
        waited_s: what the admin calls answer.
        requests: bodies of all chat calls, with the headers under ``headers``.
        closed: executions in the order in which they were closed.
        hold: calls wait until it is set.
        called, checked, refused, reopened: set at a chat call, at a health check, at a wrong admin
            token, when a session is opened.
    """

    def __init__(self, port: int = 0) -> None:
        self.policy: Policy = scripted(call("done"))
        self.failures: list[tuple[int, dict[str, str]]] = []
        self.waited_s: Callable[[], float] = lambda: 0.0
        self.admin_down = False
        self.tokens = 20
        self.requests: list[dict[str, Any]] = []
        self.usage: dict[str, int] = defaultdict(int)
        self.opened: list[str] = []
        self.closed: list[str] = []
        self.connections: list[socket.socket] = []
        self.hold = threading.Event()
        self.hold.set()
        self.called = threading.Event()
        self.incarnation = "first"
        self.checked = threading.Event()
        self.refused = threading.Event()
        self.reopened = threading.Event()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                stub.connections.append(self.connection)

            def do_POST(self) -> None:
                stub._chat(self)

            def do_PUT(self) -> None:
                stub._admin(self)

            do_GET = do_DELETE = do_PUT  # noqa: N815

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        """Stop, and end all connections. Closing again does nothing."""
        self.hold.set()
        if not self._thread.is_alive():
            return
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def register(self, store: Store, layout: RunLayout) -> None:
        registration = Registration(
            name="gateway",
            kind="gateway",
            url=self.url,
            token="admin",
            pid=1,
            incarnation="i",
            started_at=time.time(),
        )
        store.write_record(layout.host("gateway"), registration)

    def base_url(self, execution: str) -> str:
        return f"{self.url}/e/{execution}/v1"

    def _chat(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["content-length"])))
        body["headers"] = {key.lower(): value for key, value in handler.headers.items()}
        self.requests.append(body)
        self.called.set()
        self.hold.wait(30)
        if self.failures:
            status, headers = self.failures.pop(0)
            if status == 0:
                handler.close_connection = True
                return
            _answer(handler, status, {"error": "scripted"}, headers)
            return
        self.usage[handler.path.split("/")[2]] += 1
        message = self.policy(body["messages"], body["headers"])
        usage = {"prompt_tokens": self.tokens, "completion_tokens": 5}
        _answer(handler, 200, {"choices": [{"message": message}], "usage": usage})

    def _admin(self, handler: BaseHTTPRequestHandler) -> None:
        length = int(handler.headers.get("content-length", "0"))
        handler.rfile.read(length)
        if handler.headers.get("authorization") != "Bearer admin":
            _answer(handler, 401, {"error": "wrong token"})
            self.refused.set()
        elif self.admin_down:
            _answer(handler, 503, {"error": "down"})
        elif handler.path == "/healthz":
            _answer(handler, 200, {"incarnation": self.incarnation})
            self.checked.set()
        else:
            name = handler.path.rsplit("/", 1)[1]
            view = {"state": "open", "calls": self.usage[name], "waited_s": self.waited_s()}
            if handler.command == "PUT":
                self.opened.append(name)
                view = {"base_url": self.base_url(name), "api_key": f"key-{name}"}
            elif handler.command == "DELETE":
                if name not in self.opened:
                    _answer(handler, 404, {"error": "unknown"})
                    return
                self.closed.append(name)
            _answer(handler, 200, view)
            if handler.command == "PUT":
                self.reopened.set()


def _answer(
    handler: BaseHTTPRequestHandler,
    status: int,
    body: object,
    headers: dict[str, str] | None = None,
) -> None:
    data = json.dumps(body).encode()
    handler.send_response(status)
    handler.send_header("content-type", "application/json")
    for key, value in (headers or {}).items():
        handler.send_header(key, value)
    if (headers or {}).get("transfer-encoding") != "chunked":
        handler.send_header("content-length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


def contents(history: Sequence[Message]) -> list[str]:
    """Texts of a history in order."""
    return [str(message.get("content")) for message in history]
