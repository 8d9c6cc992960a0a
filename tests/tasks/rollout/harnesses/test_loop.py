"""The agent, its tools and its client, in process and as a program."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.rollout.harnesses import loop
from tasks.rollout.harnesses.loop import (
    ChatClient,
    RefusedError,
    Reply,
    Settings,
    UnavailableError,
    Workspace,
    run_agent,
)
from tests.tasks.rollout.stub_gateway import StubGateway, call, calls, contents, scripted

TEXT = {"role": "assistant", "content": "hm"}


class Files:
    """A workspace in memory."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}

    def write(self, path: str, content: str) -> str:
        self.files[path] = content
        return f"ok {path}"

    def append(self, path: str, content: str) -> str:
        self.files[path] = self.files.get(path, "") + content
        return f"ok {path}"

    def run(self, path: str) -> str:
        if path not in self.files:
            raise FileNotFoundError(path)
        return "defines f"

    def shell(self, command: str) -> str:
        if command == "bad":
            raise ValueError
        return "out" * 5000


class Model:
    """Replies in order, as (message, tokens); keeps what it was asked."""

    def __init__(self, *replies: dict | tuple[dict, int]) -> None:
        self.replies = [reply if isinstance(reply, tuple) else (reply, 10) for reply in replies]
        self.asked: list[tuple[str, str, list[str], list[str]]] = []

    def __call__(self, messages: list, tools: list, *, agent: str, call: str) -> Reply:
        names = [tool["function"]["name"] for tool in tools]
        self.asked.append((agent, call, contents(messages), names))
        message, tokens = self.replies.pop(0)
        return Reply(message, tokens)


def agent(*replies: Any, **limits: int) -> tuple[str, Model, Files]:
    model, files = Model(*replies), Files()
    return run_agent("spec", model, files, Settings(**limits)), model, files


def test_tools_and_their_answers() -> None:
    end, model, files = agent(
        call("write", path="a.py", content="1"),
        call("append", path="a.py", content="2"),
        call("run", path="a.py"),
        call("run", path="b.py"),
        call("shell", command="x"),
        call("shell", command="bad"),
        call("done"),
    )
    assert end == "done"
    assert files.files == {"a.py": "12"}
    history = model.asked[-1][2]
    assert history[:2] == ["Write the module. Tools: write, append, run, task, done.", "spec"]
    answers = ["ok a.py", "ok a.py", "defines f", "error FileNotFoundError"]
    assert history[3::2][:4] == answers
    assert len(history[11]) == loop.ANSWER_CHARS
    assert history[13] == "error: bad call"


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        (TEXT, "error: bad call"),
        ({"role": "assistant", "content": "", "tool_calls": []}, "error: bad call"),
        (calls(("write", "{not json")), "error: bad call"),
        (calls(("write", '["list"]')), "error: bad call"),
        (calls(("write", '{"path": 1, "content": "x"}')), "error: bad call"),
        (calls(("write", '{"path": "x"}')), "error: bad call"),
        (calls(("task", '{"prompt": null}')), "error: bad call"),
        (calls(("fly", "{}")), "error: no such tool"),
        (calls(("fly", "{not json")), "error: no such tool"),
        ({"role": "assistant", "tool_calls": [{"id": "c"}]}, "error: bad call"),
        ({"role": "assistant", "tool_calls": [None]}, "error: bad call"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": []}}]}, "error: bad call"),
    ],
)
def test_a_call_that_makes_no_sense_is_answered(message: dict, answer: str) -> None:
    end, model, _ = agent(message, call("done"))
    assert end == "done"
    assert model.asked[-1][2][-1] == answer


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=8), below),
    max_leaves=6,
)
_calls = st.fixed_dictionaries(
    {
        "id": _values,
        "function": _values
        | st.fixed_dictionaries(
            {
                "name": st.sampled_from(["write", "run", "task", "done", "shell"]) | _values,
                "arguments": _values | _values.map(json.dumps),
            }
        ),
    }
)


@settings(max_examples=100, deadline=None)
@given(st.lists(_calls | _values, max_size=4) | _values)
def test_no_reply_is_a_crash(tool_calls: object) -> None:
    def model(messages: list, tools: list, *, agent: str, call: str) -> Reply:
        return Reply({"role": "assistant", "content": None, "tool_calls": tool_calls}, 1000)

    assert run_agent("spec", model, Files(), Settings(turns=2, sub_agent_turns=1)) in (
        "done",
        "turns",
    )


def test_several_calls_in_one_reply_are_answered_in_order() -> None:
    many = [("shell", '{"command": "bad"}')] * 20
    end, model, files = agent(
        calls(("write", '{"path": "a", "content": ""}'), *many),
        calls(("done", "{}"), ("write", '{"path": "b", "content": ""}')),
    )
    assert end == "done"
    assert model.asked[-1][2][3:] == ["ok a", *["error: bad call"] * 20]
    assert list(files.files) == ["a"]


def test_turn_limit() -> None:
    end, model, _ = agent(*[(TEXT, 1000)] * 5, turns=3, context_budget=5000)
    assert end == "turns"
    assert len(model.asked) == 3


def test_compaction_starts_a_fresh_history() -> None:
    end, model, _ = agent(
        (call("write", path="a", content=""), 31),
        {"role": "assistant", "content": "s" * 500},
        (call("done"), 31),
        context_budget=30,
    )
    assert end == "done"
    kinds = [(name, kind) for name, kind, _, _ in model.asked]
    assert kinds == [("main", "turn"), ("main", "summary"), ("main", "turn")]
    assert model.asked[1][2][-2:] == ["ok a", "Context limit. Summarise."]
    assert model.asked[2][2] == [loop.SYSTEM, "Continue.\n" + "s" * 400]


def test_no_summary_after_the_last_turn() -> None:
    _, model, _ = agent((TEXT, 1000), turns=1)
    assert len(model.asked) == 1


def test_sub_agents_have_a_fresh_history_and_no_sub_agents() -> None:
    end, model, files = agent(
        call("task", prompt="part one"),
        call("write", path="a", content="1"),
        call("task", prompt="deeper"),
        call("done"),
        call("task", prompt="part two"),
        TEXT,
        TEXT,
        call("task", prompt="part three"),
        call("done"),
        sub_agent_turns=3,
        sub_agents=2,
    )
    assert end == "done"
    names = [name for name, _, _, _ in model.asked]
    assert names == ["main", *["task-1"] * 3, "main", *["task-2"] * 3, "main"][: len(names)]
    assert model.asked[1][2] == [loop.SYSTEM, "part one"]
    assert model.asked[1][3] == ["write", "append", "run", "shell", "done"]
    assert model.asked[3][2][-1] == "error: no such tool"
    assert "sub-agent finished" in model.asked[4][2]
    assert files.files == {"a": "1"}


def test_more_sub_agents_than_allowed_are_refused() -> None:
    _, model, _ = agent(call("task", prompt="x"), call("done"), sub_agents=0)
    assert model.asked[-1][2][-1] == "error: no such tool"
    assert "task" not in model.asked[0][3]


def test_a_refused_sub_agent_does_not_end_the_main_one() -> None:
    replies = [Reply(call("task", prompt="x"), 1), None, Reply(call("done"), 1)]

    def model(messages: list, tools: list, *, agent: str, call: str) -> Reply:
        reply = replies.pop(0)
        if reply is None:
            raise RefusedError("too long")
        return reply

    assert run_agent("spec", model, Files()) == "done"
    replies[:] = [None]
    assert run_agent("spec", model, Files()) == "refused"


# --- the workspace


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    (tmp_path / "w").mkdir()
    return Workspace(str(tmp_path / "w"), limit_s=10)


def test_files_are_written_inside(workspace: Workspace, tmp_path: Path) -> None:
    assert workspace.write("d/a.py", "one\n") == "ok d/a.py"
    assert workspace.append("d/a.py", "two\n") == "ok d/a.py"
    assert (tmp_path / "w/d/a.py").read_text() == "one\ntwo\n"
    assert workspace.write("d/a.py", "\ud800") == "ok d/a.py"
    assert (tmp_path / "w/d/a.py").read_text() == "?"


@pytest.mark.parametrize(
    "path",
    ["", "/etc/x", "../x", "d/../../x", ".", "d/..", "a\nb", "a\0b", "x" * 300, "out/x", "out"],
)
def test_paths_that_lead_outside_are_refused(
    path: str, workspace: Workspace, tmp_path: Path
) -> None:
    (tmp_path / "w/out").symlink_to(tmp_path)
    with pytest.raises(ValueError, match=r"workspace|too long"):
        workspace.write(path, "x")
    assert not (tmp_path / "x").exists()


@settings(max_examples=80, deadline=None)
@given(st.lists(st.sampled_from(["..", ".", "a", "out", "b.py", ""]), max_size=5).map("/".join))
def test_no_path_writes_outside(path: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "w")
        root.mkdir()
        (root / "out").symlink_to("..")
        with suppress(ValueError, OSError):
            Workspace(str(root)).write(path, "x")
        assert list(Path(folder).iterdir()) == [root]


def test_sizes_are_limited(workspace: Workspace, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="too long"):
        workspace.write("a", "x" * (loop.CONTENT_CHARS + 1))
    for _ in range(8):
        workspace.append("a", "x" * loop.CONTENT_CHARS)
    with pytest.raises(ValueError, match="too long"):
        workspace.append("a", "x")
    os.mkfifo(tmp_path / "w/fifo")
    with pytest.raises(OSError, match=r"fifo|address"):
        workspace.write("fifo", "x")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("import os\ndef a(x): return x\nclass B: pass\n_c = len\nd = 1\n", "defines a, B"),
        ("", "defines nothing"),
        ("def f(:", "error SyntaxError"),
        ("1/0", "error ZeroDivisionError"),
        ("raise SystemExit(0)", "error SystemExit"),
        ("import os; os._exit(0)", "error SystemExit"),
        ("import os; os.kill(os.getpid(), 9)", "error SystemExit"),
        ("print('defines x'); import helper\nfrom helper import h", "defines h"),
        ("from . import helper\ng = helper.h", "defines g"),
        (
            "from __future__ import annotations\nfrom dataclasses import dataclass\n"
            "@dataclass\nclass D:\n    x: int\n",
            "defines dataclass, D",
        ),
    ],
)
def test_run_lists_what_a_module_defines(text: str, answer: str, workspace: Workspace) -> None:
    workspace.write("p/helper.py", "def h(): pass\n")
    workspace.write("p/m.py", text)
    assert workspace.run("p/m.py") == answer


def test_run_without_a_file_and_with_one_that_hangs(tmp_path: Path) -> None:
    workspace = Workspace(str(tmp_path), limit_s=0.3)
    assert workspace.run("none.py") == "error FileNotFoundError"
    workspace.write("m.py", "while True: pass")
    assert workspace.run("m.py") == "error TimeoutError"


def test_shell(workspace: Workspace, tmp_path: Path) -> None:
    assert workspace.shell("echo out; echo err >&2; pwd; exit 3") == (
        f"out\nerr\n{Path.cwd()}\nexit code 3"
    )
    long = workspace.shell("seq 100000")
    assert long.startswith("1\n") and "\n...\n" in long and len(long) <= loop.ANSWER_CHARS
    assert workspace.shell("sleep 5 & echo started") == "started"
    assert workspace.shell("cat") == ""  # no input
    with pytest.raises(ValueError, match="zero"):
        workspace.shell("a\0b")


def test_a_command_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    workspace = Workspace(str(tmp_path), limit_s=0.5)
    answer = workspace.shell("echo before; sleep 600 & echo $!; wait")
    before, pid, error = answer.split("\n")
    assert (before, error) == ("before", "error TimeoutError")
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/cwd").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}/cwd").exists()


# --- the client


def client(gateway: StubGateway, **options: float) -> ChatClient:
    return ChatClient(gateway.base_url("x"), "key", "policy", max_tokens=7, **options)  # type: ignore[arg-type]


def ask(chat: ChatClient, **options: str) -> Reply:
    messages = [{"role": "user", "content": "hé"}]
    return chat(messages, loop.TOOLS, **{"agent": "main", "call": "turn", **options})


def test_a_request_is_plain_chat_completions(gateway: StubGateway) -> None:
    chat = client(gateway)
    reply = ask(chat, agent="task-1", call="summary")
    assert reply.message["tool_calls"][0]["function"]["name"] == "done"
    assert (reply.message["content"], reply.tokens) == ("", 25)
    request = gateway.requests[0]
    assert request["messages"] == [{"role": "user", "content": "hé"}]
    assert (request["model"], request["max_tokens"]) == ("policy", 7)
    assert request["tools"] == loop.TOOLS
    headers = request["headers"]
    assert headers["authorization"] == "Bearer key"
    assert (headers["x-agent"], headers["x-agent-call"]) == ("task-1", "summary")
    ask(chat)
    assert len(gateway.connections) == 1


def test_failures_are_tried_again(gateway: StubGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(loop.time, "sleep", pauses.append)
    failures = [(503, {"retry-after": "3"}), (429, {}), (0, {}), (401, {}), (500, {}), (529, {})]
    gateway.failures = list(failures)
    assert ask(client(gateway)).tokens == 25
    assert len(gateway.requests) == len(failures) + 1
    assert pauses[0] == 3.0
    assert all(0 < pause <= 8 * 1.5 for pause in pauses[1:])
    assert len({json.dumps(request["messages"]) for request in gateway.requests}) == 1


def test_a_refusal_is_not_tried_again(gateway: StubGateway) -> None:
    gateway.failures = [(400, {})]
    with pytest.raises(RefusedError, match="scripted"):
        ask(client(gateway))
    gateway.failures = [(404, {})]
    with pytest.raises(UnavailableError, match="404"):
        ask(client(gateway))
    assert len(gateway.requests) == 2


def test_a_model_that_stays_away(gateway: StubGateway) -> None:
    gateway.failures = [(500, {})] * 1000
    with pytest.raises(UnavailableError, match="500"):
        ask(client(gateway, give_up_s=0.3))
    gateway.failures = []
    nothing = ChatClient("http://127.0.0.1:9/v1", "k", "m", give_up_s=0.1)
    with pytest.raises(UnavailableError, match="Connection"):
        ask(nothing)


def test_a_gateway_that_comes_back(gateway: StubGateway) -> None:
    chat = client(gateway)
    ask(chat)
    port = int(gateway.url.rsplit(":", 1)[1])
    gateway.close()
    found: list[StubGateway] = []
    timer = threading.Timer(0.5, lambda: found.append(StubGateway(port)))
    timer.start()
    try:
        assert ask(chat).tokens == 25
        assert len(found[0].requests) == 1
    finally:
        timer.join()
        found[0].close()


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\nt: 1\r\n\r\n", 7),
        (b"HTTP/1.0 200 OK\r\n\r\n%b", 7),
    ],
    ids=["chunked", "until-close"],
)
def test_other_framings(raw: bytes, expected: int) -> None:
    body = json.dumps(
        {"choices": [{"message": {"content": "x"}}], "usage": {"prompt_tokens": expected}}
    ).encode()
    answer = raw % ((len(body), body) if b"%x" in raw else (body,))
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        chat = ChatClient(f"http://127.0.0.1:{server.getsockname()[1]}", "k", "m")
        reply = ask(chat)
        thread.join()
    assert (reply.message, reply.tokens) == ({"content": "x", "role": "assistant"}, 7)


# --- the program


def start(gateway: StubGateway, folder: Path, *flags: str, **env: str) -> subprocess.Popen[str]:
    (folder / "instruction").write_text("spec")
    (folder / "w").mkdir(exist_ok=True)
    environment = {"OPENAI_BASE_URL": gateway.base_url("x"), "OPENAI_API_KEY": "key", **env}
    return subprocess.Popen(
        [
            *(sys.executable, "-I", "-S", loop.__file__),
            *("--instruction-file", str(folder / "instruction"), *flags),
        ],
        cwd=folder / "w",
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_program(gateway: StubGateway, tmp_path: Path) -> None:
    gateway.policy = scripted(
        call("write", path="m.py", content="def f(): pass\n"),
        call("shell", command="env; ls"),
        call("run", path="m.py"),
        call("done"),
    )
    with start(gateway, tmp_path, "--turns", "4", PATH=os.defpath) as process:
        output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (0, "loop: done\n")
    texts = contents(gateway.requests[-1]["messages"])
    assert "OPENAI" not in texts[5] and texts[5].endswith("m.py")
    assert texts[7] == "defines f"


@pytest.mark.parametrize(
    ("flags", "said"),
    [(("--fly", "1"), "--fly"), (("--turns",), "one value"), (("--turns", "x"), "invalid literal")],
)
def test_wrong_flags(
    flags: tuple[str, ...], said: str, gateway: StubGateway, tmp_path: Path
) -> None:
    with start(gateway, tmp_path, *flags) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert said in output and "--context-budget" in output


def test_program_without_a_model(gateway: StubGateway, tmp_path: Path) -> None:
    url = {"OPENAI_BASE_URL": "http://127.0.0.1:9/v1"}
    with start(gateway, tmp_path, "--give-up-s", "0.2", **url) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == loop.EXIT_UNAVAILABLE
    assert "unavailable" in output


def test_sigterm_ends_a_running_tool(gateway: StubGateway, tmp_path: Path) -> None:
    gateway.policy = scripted(call("shell", command="echo $$ > pid.new; mv pid.new pid; sleep 600"))
    with start(gateway, tmp_path, PATH=os.defpath) as process:
        deadline = time.monotonic() + 30
        while not (tmp_path / "w/pid").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        pid = int((tmp_path / "w/pid").read_text())
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert not Path(f"/proc/{pid}/cwd").exists()


def test_the_program_imports_little(gateway: StubGateway, tmp_path: Path) -> None:
    """Every execution starts it; these would each cost it milliseconds."""
    gateway.policy = scripted(call("shell", command="true"), call("done"))
    (tmp_path / "instruction").write_text("spec")
    heavy = ["re", "enum", "json", "socket", "ssl", "http.client", "argparse", "subprocess"]
    heavy += ["dataclasses", "typing", "pathlib", "encodings.idna", "contextlib"]
    code = (
        f"import sys; sys.path.insert(0, {str(Path(loop.__file__).parent)!r}); import loop\n"
        f"code = loop.main(['--instruction-file', {str(tmp_path / 'instruction')!r}])\n"
        f"print(code, [name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code],
        env={"OPENAI_BASE_URL": gateway.base_url("x"), "OPENAI_API_KEY": "key"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "loop: done\n0 []\n", done.stderr
