"""A small coding agent in one file of the standard library.

As a program (``python -I -S loop.py --instruction-file FILE``) it works in the current folder and
speaks OpenAI chat completions with tools at ``OPENAI_BASE_URL``. As a module it gives
``run_agent``, the same agent with any ``complete`` and any workspace.

It starts once for every execution, next to engines that need the processor, so it imports little:
no argparse, dataclasses, subprocess or http.client, and of json, signal and socket only the halves
that are written in C (CPython 3.11 and 3.12 have the same). The Python halves import ``re`` and
``enum``, which takes longer than all the rest of a start.
"""

from __future__ import annotations

import _json
import _signal as signal  # type: ignore[import-not-found]
import _socket as socket
import os
import select
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, NoReturn, Protocol

    Json = dict[str, Any]

    class WorkspaceTools(Protocol):
        """What the tools act on. Each method returns the text that the model reads; it raises
        ValueError for arguments that make no sense."""

        def write(self, path: str, content: str) -> str: ...
        def append(self, path: str, content: str) -> str: ...
        def run(self, path: str) -> str: ...
        def shell(self, command: str) -> str: ...

    class Complete(Protocol):
        """One model call: the whole history, the tool schemas, who asks (``main``, ``task-1``)
        and what for (``turn`` or ``summary``)."""

        def __call__(
            self, messages: list[Json], tools: list[Json], *, agent: str, call: str
        ) -> Reply: ...


SYSTEM = "Write the module. Tools: write, append, run, task, done."
SUMMARY_REQUEST = "Context limit. Summarise."
CONTINUATION = "Continue.\n"
BAD_CALL = "error: bad call"
NO_SUCH_TOOL = "error: no such tool"

SUMMARY_CHARS = 400
CALLS_PER_REPLY = 16
PATH_CHARS = 200
CONTENT_CHARS = 1 << 20
FILE_BYTES = 8 << 20
ANSWER_CHARS = 2000
OUTPUT_BYTES = 1 << 16
RESPONSE_BYTES = 64 << 20
HEADER_BYTES = 1 << 16
_CONNECT_S = 30.0

EXIT_UNAVAILABLE = 69
"""Exit code when the model could not be reached: not the agent's doing."""


class UnavailableError(Exception):
    """The model can't be reached."""


class RefusedError(Exception):
    """The model refused this request, for example because the history is too long."""


class Reply:
    """An answer of the model.

    Attributes:
        message: the assistant's message in the form of chat completions.
        tokens: prompt and output tokens of the call; the compaction goes by it.
    """

    __slots__ = ("message", "tokens")

    def __init__(self, message: Json, tokens: int) -> None:
        self.message = message
        self.tokens = tokens


class Settings:
    """Limits of an agent: model calls of the main agent and of a sub-agent, number of sub-agents,
    and the tokens of a call after which the history is compacted."""

    __slots__ = ("context_budget", "sub_agent_turns", "sub_agents", "turns")

    def __init__(
        self,
        *,
        turns: int = 8,
        sub_agent_turns: int = 5,
        sub_agents: int = 2,
        context_budget: int = 230,
    ) -> None:
        self.turns = turns
        self.sub_agent_turns = sub_agent_turns
        self.sub_agents = sub_agents
        self.context_budget = context_budget


def _tool(name: str, description: str, **arguments: str) -> Json:
    properties = {key: {"type": "string", "description": text} for key, text in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


_WORKSPACE_TOOLS = {
    "write": ("path", "content"),
    "append": ("path", "content"),
    "run": ("path",),
    "shell": ("command",),
}
_TASK = _tool("task", "Give a part of the work to a sub-agent.", prompt="What it should do.")
TOOLS = [
    _tool("write", "Write a file.", path="Path in the workspace.", content="Its whole text."),
    _tool("append", "Add to the end of a file.", path="Path in the workspace.", content="Text."),
    _tool("run", "Import a Python file and list what it defines.", path="Path in the workspace."),
    _tool("shell", "Run a shell command in the workspace.", command="The command."),
    _TASK,
    _tool("done", "End the work."),
]
SUB_AGENT_TOOLS = [tool for tool in TOOLS if tool is not _TASK]


def run_agent(
    instruction: str,
    complete: Complete,
    workspace: WorkspaceTools,
    settings: Settings | None = None,
) -> str:
    """Let the agent work until it says ``done`` or an end is reached.

    A call that makes no sense is answered, never raised. When a call used more than
    ``settings.context_budget`` tokens, a summary is asked for and a fresh history starts with it.

    Returns:
        ``done``, ``turns`` (the limit of model calls) or ``refused`` (the model refused a request).

    Raises:
        UnavailableError: from ``complete``.
    """
    return _Agent("main", complete, workspace, settings or Settings()).work(instruction)


class _Agent:
    def __init__(
        self, name: str, complete: Complete, workspace: WorkspaceTools, settings: Settings
    ) -> None:
        self._name = name
        self._complete = complete
        self._workspace = workspace
        self._settings = settings
        self._main = name == "main"
        self._tools = TOOLS if self._main and settings.sub_agents else SUB_AGENT_TOOLS
        self._helpers = 0

    def work(self, instruction: str) -> str:
        messages = _history(instruction)
        turns = self._settings.turns if self._main else self._settings.sub_agent_turns
        try:
            tokens = 0
            for _ in range(turns):
                if tokens > self._settings.context_budget:
                    messages = self._compacted(messages)
                reply = self._ask(messages, "turn")
                tokens = reply.tokens
                messages.append(reply.message)
                if self._answer(messages, reply.message.get("tool_calls")):
                    return "done"
        except RefusedError as error:
            print(f"{self._name}: {error}", file=sys.stderr)
            return "refused"
        return "turns"

    def _ask(self, messages: list[Json], call: str) -> Reply:
        return self._complete(messages, self._tools, agent=self._name, call=call)

    def _compacted(self, messages: list[Json]) -> list[Json]:
        messages.append({"role": "user", "content": SUMMARY_REQUEST})
        content = self._ask(messages, "summary").message.get("content")
        summary = content if isinstance(content, str) else ""
        return _history(CONTINUATION + summary[:SUMMARY_CHARS])

    def _answer(self, messages: list[Json], calls: Any) -> bool:
        """Carry out the tool calls of a reply; True when one of them ends the work."""
        if not isinstance(calls, list) or not calls:
            # The protocol has no tool message without a call, so the user says it.
            messages.append({"role": "user", "content": BAD_CALL})
            return False
        for number, call in enumerate(calls):
            name, arguments = _parsed(call)
            if name == "done":
                return True
            text = BAD_CALL if number >= CALLS_PER_REPLY else self._carry_out(name, arguments)
            identifier = call.get("id", "") if isinstance(call, dict) else ""
            messages.append({"role": "tool", "tool_call_id": identifier, "content": text})
        return False

    def _carry_out(self, name: str | None, arguments: Json | None) -> str:
        if name is None:
            return BAD_CALL
        names = _WORKSPACE_TOOLS.get(name)
        if name == "task" and self._main and self._helpers < self._settings.sub_agents:
            names = ("prompt",)
        if names is None:
            return NO_SUCH_TOOL
        values = [arguments.get(key) for key in names] if arguments is not None else [None]
        if not all(isinstance(value, str) for value in values):
            return BAD_CALL
        if name == "task":
            return self._help(str(values[0]))
        try:
            text: str = getattr(self._workspace, name)(*values)
        except ValueError:
            return BAD_CALL
        except OSError as error:
            return f"error {type(error).__name__}"
        return text[:ANSWER_CHARS]

    def _help(self, prompt: str) -> str:
        self._helpers += 1
        name = f"task-{self._helpers}"
        _Agent(name, self._complete, self._workspace, self._settings).work(prompt)
        return "sub-agent finished"


class _Decoding:
    """What the C scanner of JSON asks for."""

    strict = False
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = float


def _refuse(value: object) -> NoReturn:
    raise TypeError(f"{type(value).__name__} is not JSON")


_scan = _json.make_scanner(_Decoding)  # type: ignore[arg-type]
_encode = _json.make_encoder(
    None, _refuse, _json.encode_basestring_ascii, None, ": ", ", ", False, False, True
)
_SPACE = " \t\n\r"


def _dumps(value: object) -> str:
    return "".join(_encode(value, 0))


def _loads(text: str) -> Any:
    """The value in a JSON text; ValueError for anything else."""
    text = text.strip(_SPACE)
    try:
        value, end = _scan(text, 0)
    except StopIteration:
        raise ValueError("not JSON") from None
    if end != len(text):
        raise ValueError("text after the JSON value")
    return value


def _history(instruction: str) -> list[Json]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": instruction}]


def _parsed(call: Any) -> tuple[str | None, Json | None]:
    """Name and arguments of a tool call; None for what can't be read."""
    try:
        function = call["function"]
        name, arguments = function["name"], function.get("arguments")
        if isinstance(arguments, str):
            arguments = _loads(arguments)
    except (TypeError, KeyError, AttributeError, ValueError, RecursionError):
        arguments = None
        name = _name_only(call)
    name = name if isinstance(name, str) else None
    return name, arguments if isinstance(arguments, dict) else None


def _name_only(call: Any) -> Any:
    try:
        return call["function"]["name"]
    except (TypeError, KeyError):
        return None


class Workspace:
    """The tools on a real folder.

    Args:
        root: the folder; paths that lead outside are refused.
        limit_s: longest time of ``run`` and ``shell``.
        delay_s: time that they take longer than they would: a slow tool.
        environment: of commands.
    """

    def __init__(
        self,
        root: str,
        *,
        limit_s: float = 10.0,
        delay_s: float = 0.0,
        environment: dict[str, str] | None = None,
    ) -> None:
        self._root = os.path.realpath(root)
        self._limit_s = limit_s
        self._delay_s = delay_s
        self._environment = dict(os.environ) if environment is None else environment

    def write(self, path: str, content: str) -> str:
        """Replace the text of a file: ``ok <path>``."""
        return self._put(path, content, os.O_TRUNC)

    def append(self, path: str, content: str) -> str:
        """Add to the end of a file, which is made when missing: ``ok <path>``."""
        return self._put(path, content, os.O_APPEND)

    def run(self, path: str) -> str:
        """Import a Python file in a child process: ``defines a, b`` or ``error <Type>``."""
        full = self._inside(path)
        time.sleep(self._delay_s)
        read, write = os.pipe()
        pid = os.fork()  # this program has one thread, and a fork costs a tenth of a new Python
        if not pid:
            _import_and_list(full, self._root, write)
        os.close(write)
        output, code = _collect(pid, read, self._limit_s)
        if code is None:
            return "error TimeoutError"
        return output if output.startswith(("defines ", "error ")) else "error SystemExit"

    def shell(self, command: str) -> str:
        """Run a command: its output, and its exit code when that is not zero."""
        if "\0" in command:
            raise ValueError("a command with a zero byte")
        time.sleep(self._delay_s)
        read, write = os.pipe()
        try:
            pid = os.posix_spawn(
                "/bin/sh",
                ["sh", "-c", command],
                self._environment,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, write, 1),
                    (os.POSIX_SPAWN_DUP2, write, 2),
                ],
                setsid=True,
                setsigdef=[signal.SIGTERM, signal.SIGPIPE],
            )
        finally:
            os.close(write)
        output, code = _collect(pid, read, self._limit_s)
        if code is None:
            return f"{output}\nerror TimeoutError".lstrip()
        return output if code == 0 else f"{output}\nexit code {code}".lstrip()

    def _inside(self, path: str) -> str:
        if not path or len(path) > PATH_CHARS or not path.isprintable() or path.startswith("/"):
            raise ValueError("not a path in the workspace")
        full = os.path.normpath(os.path.join(self._root, path))
        # A link may lead anywhere; what it leads to must lie inside too.
        for place in (full, os.path.realpath(full)):
            if not place.startswith(self._root + "/"):
                raise ValueError("not a path in the workspace")
        return full

    def _put(self, path: str, content: str, mode: int) -> str:
        full = self._inside(path)
        if len(content) > CONTENT_CHARS:
            raise ValueError("too long")
        data = content.encode("utf-8", "replace")
        os.makedirs(os.path.dirname(full), exist_ok=True)
        # O_NONBLOCK: a fifo that the agent made must not hang the agent.
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | mode
        file = os.open(os.path.realpath(full), flags, 0o644)
        try:
            if os.fstat(file).st_size + len(data) > FILE_BYTES:
                raise ValueError("too long")
            while data:
                data = data[os.write(file, data) :]
        finally:
            os.close(file)
        return f"ok {path}"


def _import_and_list(full: str, root: str, write: int) -> NoReturn:
    """In the child: import a file and write the outcome to ``write``. Never returns."""
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        output = os.dup2(write, 3) if write != 3 else write
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        os.closerange(4, 4096)  # the connection to the model is none of the module's business
        sys.stdin = sys.stdout = sys.stderr = open(0, "r+")  # noqa: SIM115
        text = _outcome_of_import(full, root)
        os.write(output, text[:ANSWER_CHARS].encode("utf-8", "replace"))
    finally:
        os._exit(0)


def _outcome_of_import(full: str, root: str) -> str:
    os.environ.pop("OPENAI_API_KEY", None)
    sys.dont_write_bytecode = True
    sys.path[:0] = [os.path.dirname(full), root]
    name = os.path.relpath(full, root).removesuffix(".py").replace("/", ".")
    module = type(sys)(name)
    module.__file__ = full
    module.__package__ = name.rpartition(".")[0]
    sys.modules[name] = module
    try:
        with open(full, encoding="utf-8") as file:
            code = compile(file.read(FILE_BYTES), os.path.basename(full), "exec")
        exec(code, module.__dict__)  # noqa: S102  (the agent's own code, in a child)
        defined = [
            key for key, value in module.__dict__.items() if key[0] != "_" and callable(value)
        ]
    except BaseException as error:  # noqa: BLE001  (whatever the agent's module raises)
        return f"error {type(error).__name__}"
    return f"defines {', '.join(defined) or 'nothing'}"


def _collect(pid: int, pipe: int, limit_s: float) -> tuple[str, int | None]:
    """Output and exit code of a child that leads its own session; at the limit the session is
    killed and the code is None. What the child left in the background does not hold this up."""
    watch = os.pidfd_open(pid)
    os.set_blocking(pipe, False)
    waiting = select.poll()
    waiting.register(pipe, select.POLLIN)
    waiting.register(watch, select.POLLIN)
    deadline = time.monotonic() + limit_s
    data = b""
    ended = False
    try:
        while not ended and (left := deadline - time.monotonic()) > 0:
            ready = [descriptor for descriptor, _ in waiting.poll(left * 1000)]
            ended = watch in ready
            if pipe in ready:
                piece = _available(pipe)
                data = (data + piece)[:OUTPUT_BYTES]
                if not piece:
                    waiting.unregister(pipe)
    finally:  # also when SIGTERM comes
        if not ended:
            for kill in (os.killpg, os.kill):
                try:  # noqa: SIM105  (contextlib is one more import)
                    kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        os.close(watch)
        os.close(pipe)
        _, status = os.waitpid(pid, 0)
    text = data.decode("utf-8", "replace").rstrip("\n")
    return _shortened(text), os.waitstatus_to_exitcode(status) if ended else None


def _available(pipe: int) -> bytes:
    """What can be read at once, at most ``OUTPUT_BYTES``; empty at the end."""
    data = b""
    while len(data) < OUTPUT_BYTES:
        try:
            piece = os.read(pipe, OUTPUT_BYTES)
        except BlockingIOError:
            break
        if not piece:
            break
        data += piece
    return data


def _shortened(text: str) -> str:
    half = ANSWER_CHARS // 2 - 20
    return text if len(text) <= 2 * half else f"{text[:half]}\n...\n{text[-half:]}"


class ChatClient:
    """``Complete`` over HTTP: chat completions, not streamed, on one kept connection.

    Refused connections, 429 and 5xx are tried again with back-off (``retry-after`` honoured); so is
    401, because a proxy that was just restarted may not know its keys yet.

    Args:
        base_url: with its version, for example ``http://127.0.0.1:8000/v1``.
        limit_s: longest wait for one answer.
        give_up_s: the model counts as unavailable after failing for so long.
    """

    def __init__(
        self,
        base_url: str,
        key: str,
        model: str,
        *,
        max_tokens: int = 150,
        limit_s: float = 3600.0,
        give_up_s: float = 300.0,
    ) -> None:
        self._scheme, _, rest = base_url.rstrip("/").partition("://")
        self._authority, _, path = rest.partition("/")
        if self._scheme not in ("http", "https") or not self._authority:
            raise ValueError(f"{base_url!r}: not an http address")
        self._path = f"/{path}/chat/completions" if path else "/chat/completions"
        self._key = key
        self._model = model
        self._max_tokens = max_tokens
        self._limit_s = limit_s
        self._give_up_s = give_up_s
        self._stream: _Stream | None = None

    def __call__(self, messages: list[Json], tools: list[Json], *, agent: str, call: str) -> Reply:
        """One answer.

        Raises:
            UnavailableError: no answer for ``give_up_s``, or the address is not known.
            RefusedError: the request was refused (400, 413, 422).
        """
        body = {
            "model": self._model,
            "messages": messages,
            "tools": tools,
            "max_tokens": self._max_tokens,
        }
        data = _dumps(body).encode()
        head = (
            f"POST {self._path} HTTP/1.1\r\nhost: {self._authority}\r\n"
            f"authorization: Bearer {self._key}\r\ncontent-type: application/json\r\n"
            f"x-agent: {agent}\r\nx-agent-call: {call}\r\ncontent-length: {len(data)}\r\n\r\n"
        ).encode()
        give_up_at = time.monotonic() + self._give_up_s
        pause = 0.25
        while True:
            retry_after = 0.0
            started = time.monotonic()
            try:
                status, headers, answer = self._exchange(head + data)
                if status == 200:
                    return _reply(answer)
                problem = f"HTTP {status}: {answer[:300].decode('utf-8', 'replace')}"
                if status in (400, 413, 422):
                    raise RefusedError(problem)
                if status not in (401, 408, 409, 425, 429) and status < 500:
                    raise UnavailableError(problem)
                retry_after = _seconds(headers.get("retry-after", ""))
            except (OSError, ValueError, EOFError) as error:
                self._drop()
                problem = f"{type(error).__name__}: {error}"
            now = time.monotonic()
            # A long wait for an answer is not a failure that lasted long.
            give_up_at += max(0.0, now - started - 5)
            if now > give_up_at:
                raise UnavailableError(problem)
            time.sleep(max(retry_after, pause * (0.5 + os.urandom(1)[0] / 255)))
            pause = min(pause * 2, 8.0)

    def _exchange(self, request: bytes) -> tuple[int, dict[str, str], bytes]:
        if self._stream is None:
            self._stream = self._connect()
        stream = self._stream
        stream.connection.sendall(request)
        line = stream.line()
        if not line.startswith(b"HTTP/1."):
            raise EOFError("the connection was closed" if not line else "not an HTTP answer")
        status = int(line.split()[1])
        headers = stream.headers()
        if "chunked" in headers.get("transfer-encoding", "").lower():
            answer = stream.chunks()
        elif "content-length" in headers:
            answer = stream.exactly(int(headers["content-length"]))
        else:
            answer = stream.rest()
            headers["connection"] = "close"
        if headers.get("connection", "").lower() == "close":
            self._drop()
        return status, headers, answer

    def _connect(self) -> _Stream:
        host, separator, port = self._authority.rpartition(":")
        if not separator or not port.isdigit():
            host, port = self._authority, "443" if self._scheme == "https" else "80"
        host = host.strip("[]")
        name = host.encode()  # as text it would go through the idna codec, which imports re
        problem = OSError(f"{host} has no address")
        for family, kind, protocol, _, address in socket.getaddrinfo(
            name, int(port), 0, socket.SOCK_STREAM
        ):
            connection: Any = socket.socket(family, kind, protocol)
            try:
                connection.settimeout(_CONNECT_S)
                connection.connect(address)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._scheme == "https":
                    connection = _encrypted(connection, host)
                connection.settimeout(self._limit_s)
                return _Stream(connection)
            except OSError as error:
                connection.close()
                problem = error
        raise problem

    def _drop(self) -> None:
        if self._stream is not None:
            try:  # noqa: SIM105
                self._stream.connection.close()
            except OSError:
                pass
            self._stream = None


def _encrypted(connection: Any, host: str) -> Any:
    import ssl  # slow to import, and not needed beside the engines
    from socket import socket as full

    plain = full(fileno=connection.detach())
    plain.settimeout(_CONNECT_S)
    return ssl.create_default_context().wrap_socket(plain, server_hostname=host)


class _Stream:
    """Reads HTTP/1.1 answers from a connection. EOFError when it ends inside one, ValueError for
    one that is too long."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self._buffer = b""

    def line(self) -> bytes:
        """The next line without its end; empty at the end of the connection."""
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > HEADER_BYTES:
                raise ValueError("a line that is too long")
            if not self._more():
                return b""
        line, self._buffer = self._buffer[:end], self._buffer[end + 1 :]
        return line.rstrip(b"\r")

    def headers(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        left = HEADER_BYTES
        while line := self.line():
            left -= len(line)
            if left < 0:
                raise ValueError("headers that are too long")
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip()
        return headers

    def exactly(self, size: int, have: int = 0) -> bytes:
        if size < 0 or have + size > RESPONSE_BYTES:
            raise ValueError("an answer that is too long")
        while len(self._buffer) < size:
            if not self._more():
                raise EOFError("the connection was closed inside the answer")
        data, self._buffer = self._buffer[:size], self._buffer[size:]
        return data

    def chunks(self) -> bytes:
        data = b""
        while size := int(self.line().split(b";")[0], 16):
            data += self.exactly(size, have=len(data))
            self.line()
        self.headers()  # trailers
        return data

    def rest(self) -> bytes:
        while self._more():
            if len(self._buffer) > RESPONSE_BYTES:
                raise ValueError("an answer that is too long")
        data, self._buffer = self._buffer, b""
        return data

    def _more(self) -> bool:
        piece: bytes = self.connection.recv(1 << 16)
        self._buffer += piece
        return bool(piece)


def _reply(answer: bytes) -> Reply:
    """The reply in a chat completion; ValueError for anything else."""
    body = _loads(answer.decode())
    try:
        message = body["choices"][0]["message"]
        usage = body.get("usage") or {}
        tokens = int(usage.get("prompt_tokens", 0)) + int(usage.get("completion_tokens", 0))
        kept = {key: value for key, value in message.items() if value is not None}
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"not a chat completion: {type(error).__name__} {error}") from None
    kept.setdefault("role", "assistant")
    kept.setdefault("content", "")
    return Reply(kept, tokens)


def _seconds(text: str) -> float:
    try:
        return min(max(float(text), 0.0), 60.0)
    except ValueError:
        return 0.0


_FLAGS: dict[str, Any] = {
    "instruction-file": "",
    "turns": 8,
    "sub-agent-turns": 5,
    "sub-agents": 2,
    "context-budget": 230,
    "max-tokens": 150,
    "tool-timeout-s": 10.0,
    "tool-delay-s": 0.0,
    "call-timeout-s": 3600.0,
    "give-up-s": 300.0,
}


def _flags(arguments: Sequence[str]) -> Json:
    """Values of ``--name value`` pairs over the defaults; ValueError for what is not one."""
    values = dict(_FLAGS)
    if len(arguments) % 2:
        raise ValueError("every flag takes one value")
    for flag, text in zip(arguments[::2], arguments[1::2], strict=True):
        name = flag.removeprefix("--")
        if name not in _FLAGS or flag == name:
            raise ValueError(f"unknown flag {flag}")
        values[name] = type(_FLAGS[name])(text)
    return values


def _stop(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def main(arguments: Sequence[str]) -> int:
    """Work on the instruction in the current folder; the exit code is 0 unless the model was
    unavailable (69) or the arguments are wrong (2)."""
    try:
        flags = _flags(arguments)
        with open(flags["instruction-file"], encoding="utf-8") as file:
            instruction = file.read()
        client = ChatClient(
            os.environ["OPENAI_BASE_URL"],
            os.environ["OPENAI_API_KEY"],
            os.environ.get("OPENAI_MODEL", "policy"),
            max_tokens=flags["max-tokens"],
            limit_s=flags["call-timeout-s"],
            give_up_s=flags["give-up-s"],
        )
    except (ValueError, OSError, KeyError) as error:
        names = ", ".join(f"--{name}" for name in _FLAGS)
        print(f"loop: {type(error).__name__}: {error}; flags: {names}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _stop)
    environment = {key: text for key, text in os.environ.items() if not key.startswith("OPENAI_")}
    workspace = Workspace(
        os.getcwd(),  # noqa: PTH109
        limit_s=flags["tool-timeout-s"],
        delay_s=flags["tool-delay-s"],
        environment=environment,
    )
    settings = Settings(
        turns=flags["turns"],
        sub_agent_turns=flags["sub-agent-turns"],
        sub_agents=flags["sub-agents"],
        context_budget=flags["context-budget"],
    )
    try:
        end = run_agent(instruction, client, workspace, settings)
    except UnavailableError as error:
        print(f"loop: the model is unavailable: {error}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    print(f"loop: {end}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
