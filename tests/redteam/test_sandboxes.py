"""Attacks on the sandbox: an agent reaches nothing but its workspace and its own model, and what it
uses up is its own."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import psutil
import pytest

from storage.records import ExecutionOutcome, Scored
from tasks.rollout import snapshot
from tasks.rollout.door import BACKLOG, CONNECTIONS, DUMMY_KEY
from tasks.rollout.sandboxes.cgroup import hierarchies
from tests.redteam.conftest import EXECUTION, Attack, Forged
from tests.tasks.rollout.stub_gateway import StubGateway

pytestmark = pytest.mark.real

TRY = """
import os, socket, subprocess, sys
def attempt(name, function):
    try:
        value = function()
    except BaseException as error:
        print(name, 'refused', type(error).__name__)
    else:
        print(name, 'DONE', repr(value)[:200])
def shell(command):
    return subprocess.run(command, shell=True, check=True, capture_output=True, timeout=20).stdout
"""


def names(folder: str) -> set[str]:
    return {path.name for path in Path(folder).iterdir()}


def refused(said: str, count: int) -> bool:
    return said.count("refused") == count and "DONE" not in said


async def test_files_of_the_host(attack: Attack, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    paths = [str(secret), "/etc/shadow", "/root/.bashrc", "/var/log", __file__, "/sys/fs/cgroup"]
    paths += [str(tmp_path / "store"), f"/proc/1/root{secret}"]
    program = (
        TRY
        + f"""
for path in {paths!r}:
    attempt(path, lambda: os.listdir(path) if os.path.isdir(path) else open(path).read())
"""
    )
    attacked = await attack(program)
    assert refused(attacked.said, len(paths)), attacked.said


async def test_the_hidden_tests_and_how_they_are_made(attack: Attack) -> None:
    program = (
        TRY
        + """
attempt('import', lambda: __import__('tasks.problems.specrepo.source'))
found = []
for folder, folders, files in os.walk('/'):
    if folder == '/':
        folders.remove('proc')
    found += [folder for name in files if name == 'result.json']
    found += [folder for name in files if 'specrepo' in folder and name.endswith('.py')]
    found += [folder for name in folders if name == 'calls']
print('FOUND', found)
"""
    )
    # All files of the system: on a busy machine that takes longer than a tool usually may.
    attacked = await attack(program, tool_timeout_s=120, limit_s=180)
    assert refused(attacked.said.split("FOUND")[0], 1), attacked.said
    assert "FOUND []" in attacked.said


async def test_changes_to_the_system(attack: Attack) -> None:
    program = (
        TRY
        + """
for path in ('/usr/x', '/etc/x', '/x', '/dev/x', '/proc/sys/kernel/core_pattern', '/etc/passwd'):
    attempt(path, lambda: open(path, 'r+' if os.path.exists(path) else 'x'))
attempt('oom', lambda: open('/proc/1/oom_score_adj', 'w').write('1000'))
attempt('usr', lambda: shell('mount -o remount,rw,bind /usr && touch /usr/gyre-attack'))
attempt('workspace', lambda: shell('mount -o remount,size=10g /workspace'))
attempt('tmpfs', lambda: shell('mount -t tmpfs x /mnt || mount -t tmpfs x /tmp'))
attempt('proc', lambda: shell('mount -t proc proc /tmp'))
attempt('nested', lambda: shell('unshare -Urm mount -o remount,rw,bind /usr'))
attempt('node', lambda: os.mknod('/tmp/disk', 0o060666, os.makedev(254, 0)))
attempt('chroot', lambda: os.chroot('/tmp'))
attempt('setuid', lambda: os.setgroups([0]))
"""
    )
    attacked = await attack(program)
    assert refused(attacked.said, 15), attacked.said
    assert "gyre-attack" not in names("/usr")


async def test_processes_of_the_host(attack: Attack) -> None:
    program = (
        TRY
        + f"""
attempt('kill', lambda: os.kill({os.getpid()}, 0))
attempt('root', lambda: os.listdir('/proc/{os.getpid()}/root'))
attempt('trace', lambda: open('/proc/1/mem', 'rb').read(1))
print('SEEN', len([n for n in os.listdir('/proc') if n.isdigit()]))
print('OPEN', sorted(int(n) for n in os.listdir('/proc/self/fd'))[:-1])
"""
    )
    attacked = await attack(program)
    assert attacked.said.count("refused") == 3, attacked.said
    seen = int(attacked.said.split("SEEN")[1].split()[0])
    assert seen < 10
    assert "OPEN [0, 1, 2]" in attacked.said


async def test_the_network(attack: Attack, gateway: StubGateway) -> None:
    """Neither the machine's own servers, the gateway's real port included, nor anything else."""
    port = int(gateway.url.rsplit(":", 1)[1])
    with socket.socket(socket.AF_UNIX) as abstract, socket.socket() as server:
        name = f"gyre-attack-{os.getpid()}"
        abstract.bind("\0" + name)
        abstract.listen(1)
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        program = (
            TRY
            + f"""
def connect(*address): socket.create_connection(address, timeout=3)
attempt('gateway', lambda: connect('127.0.0.1', {port}))
attempt('server', lambda: connect('127.0.0.1', {server.getsockname()[1]}))
attempt('any', lambda: connect('0.0.0.0', {port}))
attempt('out', lambda: connect('1.1.1.1', 53))
attempt('metadata', lambda: connect('169.254.169.254', 80))
attempt('name', lambda: socket.getaddrinfo('example.com', 80))
attempt('abstract', lambda: socket.socket(socket.AF_UNIX).connect('\\0{name}'))
attempt('raw', lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
attempt('device', lambda: shell('ip link add x type dummy'))
"""
        )
        attacked = await attack(program)
    assert refused(attacked.said, 9), attacked.said


async def test_the_gateway_with_another_key(attack: Attack, gateway: StubGateway) -> None:
    """Whatever is asked for at the door, it is asked for this execution and with its key."""
    program = (
        TRY
        + """
import http.client, json
def ask(path, method='GET', **headers):
    connection = http.client.HTTPConnection('127.0.0.1', 8000, timeout=20)
    connection.putrequest(method, path, skip_host=True)
    for name, value in {'host': 'x', **headers}.items():
        connection.putheader(name.replace('_', '-'), value)
    connection.putheader('content-length', '2')
    connection.endheaders(b'{}')
    answer = connection.getresponse()
    assert answer.status == 200, answer.status
for path in ('/admin/executions/other', '/v1/../admin/state', '/v1/%2e%2e/admin/state', '/metrics',
             '/e/other/v1/models', '/v1', '/v1/', '/v1//e/other/v1/models', 'http://other/v1/models',
             '/v1/..', '/v1/x/../../../admin/state'):
    attempt(path, lambda: ask(path))
attempt('key', lambda: ask('/v1/models', authorization='Bearer key-other', x_api_key='key-other'))
attempt('token', lambda: ask('/v1/models', authorization='Bearer admin'))
s = socket.create_connection(('127.0.0.1', 8000))
s.sendall(b'POST /v1/models HTTP/1.1\\r\\nhost: x\\r\\ncontent-length: 4\\r\\n'
          b'transfer-encoding: chunked\\r\\n\\r\\n0\\r\\n\\r\\n'
          b'GET /admin/state HTTP/1.1\\r\\nhost: x\\r\\nauthorization: Bearer admin\\r\\n\\r\\n')
s.settimeout(5)
print('SMUGGLED' if b' 200 ' in s.recv(4096) else 'no')
"""
    )
    attacked = await attack(program)
    assert refused(attacked.said, 13), attacked.said
    assert "SMUGGLED" not in attacked.said
    keys = {request["headers"]["authorization"] for request in gateway.requests}
    assert keys == {f"Bearer key-{EXECUTION}"}
    assert gateway.opened == [EXECUTION]


async def test_the_key_is_not_inside(attack: Attack) -> None:
    program = """
import glob, os
text = b''
for name in glob.glob('/proc/*/environ') + glob.glob('/proc/*/cmdline'):
    try: text += open(name, 'rb').read()
    except OSError: pass
print('KEY' if b'key' + b'-s0' in text else 'none', os.environ.get('OPENAI_API_KEY'))
"""
    attacked = await attack(program)
    assert attacked.said == "none None"
    assert not DUMMY_KEY.startswith("key-")


async def test_a_flood_of_connections(attack: Attack) -> None:
    program = """
import socket
made = []
for _ in range(200):
    try:
        s = socket.create_connection(('127.0.0.1', 8000), timeout=2)
        s.sendall(b'GET /v1/models HTTP/1.1\\r\\n')
        made.append(s)
    except OSError:
        pass
alive = 0
for s in made:
    s.settimeout(0.01)
    try:
        alive += s.recv(1) != b''
    except TimeoutError:
        alive += 1
    except OSError:
        pass
print('ALIVE', alive)
"""
    attacked = await attack(program)
    assert attacked.result.outcome is ExecutionOutcome.COMPLETED
    assert int(attacked.said.split("ALIVE")[1]) <= CONNECTIONS + BACKLOG


FORK_BOMB = """
import os, time
while True:
    try:
        os.fork()
    except OSError:
        time.sleep(0.01)
"""


async def test_a_fork_bomb(attack: Attack) -> None:
    before = len(psutil.pids())
    attacked = await attack(FORK_BOMB, limit_s=3, processes=64)
    assert attacked.result.outcome is ExecutionOutcome.TIMED_OUT
    assert isinstance(attacked.verdict().verdict, Scored)
    if any("pids" in tree.controllers for tree in hierarchies()):
        assert "limit of processes" in attacked.result.detail
    assert len(psutil.pids()) < before + 64


async def test_filling_memory(attack: Attack) -> None:
    program = "x = []\nwhile True: x.append(bytearray(1 << 24))"
    attacked = await attack(program, memory_mb=256)
    assert attacked.result.outcome is ExecutionOutcome.COMPLETED
    assert isinstance(attacked.verdict().verdict, Scored)


async def test_many_small_processes_do_not_get_more_memory(attack: Attack) -> None:
    if not any("memory" in tree.controllers for tree in hierarchies()):
        return  # the limit is each process's own here, and docs/sandboxes.md says so
    program = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        x = bytearray(b'x' * (100 << 20))
        time.sleep(60)
time.sleep(60)
"""
    attacked = await attack(program, memory_mb=256, limit_s=20)
    assert "limit of memory" in attacked.result.detail
    assert isinstance(attacked.verdict().verdict, Scored)


async def test_filling_the_disk(attack: Attack) -> None:
    program = """
import itertools, os
for place in ('/workspace', '/tmp', '/dev/shm', '/home/agent'):
    size = 0
    for number in itertools.count():
        try:
            with open(f'{place}/f{number}', 'wb') as file:
                os.posix_fallocate(file.fileno(), 0, 1 << 20)
            size += 1
        except OSError as error:
            break
        if size > 200:
            break
    print('SIZE', size)
"""
    attacked = await attack(program, disk_mb=16)
    sizes = [int(text.split()[0]) for text in attacked.said.split("SIZE")[1:]]
    assert len(sizes) == 4 and max(sizes) <= 16, attacked.said
    assert isinstance(attacked.verdict().verdict, Scored)


async def test_a_giant_file(attack: Attack) -> None:
    program = """
with open('small', 'w') as file: file.write('x')
with open('giant', 'wb') as file: file.truncate(1 << 40)
"""
    attacked = await attack(program)
    assert attacked.result.outcome is ExecutionOutcome.COMPLETED
    assert "small" in attacked.names
    giant = attacked.workspace / "giant"
    assert not giant.exists() or giant.stat().st_size == 0


async def test_many_files_and_depth(attack: Attack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "ENTRIES", 500)
    program = """
import os
open('a', 'w').close()
os.mkdir('many')
for number in range(800): os.symlink('x' * 200, f'many/{number:05d}')
for _ in range(1200):
    os.mkdir('deep'); os.chdir('deep')
"""
    attacked = await attack(program, limit_s=120)
    assert attacked.result.outcome is ExecutionOutcome.COMPLETED
    assert "a" in attacked.names
    assert "more than" in attacked.result.detail
    assert isinstance(attacked.verdict().verdict, Scored)


async def test_flooding_the_harness_log(attack: Attack) -> None:
    program = """
import os
parent = os.getppid()
for name in os.listdir('/proc'):
    if name.isdigit():
        try:
            file = open(f'/proc/{name}/fd/1', 'ab')
            for _ in range(100): file.write(bytes(1 << 20)); file.flush()
        except OSError as error:
            print('STOPPED', error)
"""
    attacked = await attack(program, disk_mb=4)
    assert attacked.result.outcome is ExecutionOutcome.COMPLETED


async def test_links_to_the_outside(attack: Attack, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hidden")
    program = f"""
import os
os.symlink({str(tmp_path / "secret")!r}, 'absolute')
os.symlink('../' * 12 + {str(tmp_path / "secret")!r}, 'relative')
os.symlink('/proc/self/root', 'root')
os.mkdir('d'); os.symlink('..', 'd/up'); os.symlink('d/up/../etc', 'chain')
for path in ('/usr/bin/env', '/etc/passwd', '/run/entry.pyc'):
    try: os.link(path, os.path.basename(path))
    except OSError as error: print('refused')
"""
    attacked = await attack(program)
    assert attacked.said.count("refused") == 3
    assert not attacked.names & {"absolute", "relative", "root", "chain", "env", "passwd"}
    assert "hidden" not in "".join(
        path.read_text(errors="ignore") for path in attacked.workspace.rglob("*") if path.is_file()
    )


@pytest.mark.parametrize("sandbox", ["bubblewrap", "process"])
async def test_a_deleted_workspace(attack: Attack, sandbox: str, tmp_path: Path) -> None:
    """Or one that something else was put in the place of: what is scored is the workspace."""
    (tmp_path / "secret").write_text("hidden")
    program = f"""
import os, shutil
here = os.getcwd()
shutil.rmtree(here, ignore_errors=True)
try:
    os.rmdir(here)
except OSError:
    pass
try:
    os.symlink({str(tmp_path)!r}, here)
except OSError:
    pass
"""
    attacked = await attack(program, sandbox=sandbox)
    assert attacked.result.outcome is ExecutionOutcome.COMPLETED, attacked.result.detail
    assert attacked.names == set()
    verdict = attacked.verdict().verdict
    assert isinstance(verdict, Scored) and verdict.reward == 0.0


async def test_strange_names_and_modes(attack: Attack) -> None:
    program = r"""
import os
for name in (b'new\nline', b'\xff\xfe', b'\x1b[31m', b'-rf', b' ', b'a' * 255, b'back\\slash'):
    open(name, 'w').close()
os.mkfifo('fifo'); os.mkdir('shut'); open('shut/f', 'w').close()
os.chmod('shut/f', 0); os.chmod('shut', 0); os.chmod('.', 0)
"""
    attacked = await attack(program)
    assert attacked.result.outcome is ExecutionOutcome.COMPLETED, attacked.result.detail
    assert {"new\nline", "-rf", " ", "shut"} <= attacked.names
    assert isinstance(attacked.verdict().verdict, Scored)


DAEMONS = """
import os, signal, subprocess, sys
for number in signal.SIGTERM, signal.SIGHUP, signal.SIGINT:
    signal.signal(number, signal.SIG_IGN)
subprocess.Popen(['setsid', 'sleep', '86398'], env={}, cwd='/')
subprocess.Popen(['nohup', 'setsid', 'setsid', 'sleep', '86398'], env={}, cwd='/')
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.chdir('/')
        os.execve('/bin/sleep', ['sleep', '86398'], {})
    os._exit(0)
"""


@pytest.mark.parametrize("sandbox", ["bubblewrap", "process"])
async def test_daemons_do_not_survive(attack: Attack, sandbox: str) -> None:
    if sandbox == "process" and not hierarchies():
        return  # nothing finds them there without a control group; docs/sandboxes.md says so
    attacked = await attack(DAEMONS, sandbox=sandbox)
    assert attacked.result.outcome is ExecutionOutcome.COMPLETED, attacked.result.detail
    assert not [
        one.pid
        for one in psutil.process_iter(["cmdline"])
        if (one.info["cmdline"] or [])[-1:] == ["86398"]
    ]


KILLERS = {
    "harness": "import os, signal; os.kill(os.getppid(), 9); os.kill(os.getpid() - 1, 9)",
    "all": "import os; os.kill(-1, 9)",
    "init": "import os\nfor n in range(1, 9):\n  try: os.kill(n, 9)\n  except OSError: pass",
    "stop": "import os\nfor n in range(1, 9):\n  try: os.kill(n, 19)\n  except OSError: pass",
}


@pytest.mark.parametrize("name", KILLERS)
async def test_killing_the_harness_is_scored(attack: Attack, name: str) -> None:
    attacked = await attack(f"open('left', 'w').close()\n{KILLERS[name]}", limit_s=4)
    assert attacked.result.outcome is not ExecutionOutcome.HOST_FAILED, attacked.result.detail
    assert "left" in attacked.names
    assert isinstance(attacked.verdict().verdict, Scored)


CALL = """
import os, socket, sys
def ask(body=b'{"messages": []}', path='/v1/chat/completions', method='POST'):
    s = socket.create_connection(('127.0.0.1', 8000))
    s.sendall(f'{method} {path} HTTP/1.1\\r\\nhost: x\\r\\ncontent-length: {len(body)}\\r\\n'
              'connection: close\\r\\n\\r\\n'.encode() + body)
    answer = b''
    while piece := s.recv(65536):
        answer += piece
    return answer
ask()
open('left', 'w').close()
"""

EXCLUSIONS = {
    "exit code of an unavailable model": "sys.exit(69)",
    "any exit code": "os._exit(3)",
    "a signal": "os.kill(os.getpid(), 11)",
    "a path that does not exist": "ask(path='/v1/nothing'); sys.exit(69)",
    "a wrong method": "ask(method='BREW'); sys.exit(69)",
    "a body too large": "ask(bytes(40 << 20)); sys.exit(69)",
    "half a request": (
        "s = socket.create_connection(('127.0.0.1', 8000)); "
        "s.sendall(b'POST /v1/chat/completions HTTP/1.1\\r\\ncontent-length: 9\\r\\n\\r\\n{'); "
        "s.close(); sys.exit(69)"
    ),
    "nonsense": (
        "s = socket.create_connection(('127.0.0.1', 8000)); s.sendall(bytes(range(256)) * 99); "
        "s.close(); sys.exit(69)"
    ),
    "a call that is given up": (
        "s = socket.create_connection(('127.0.0.1', 8000)); "
        "s.sendall(b'POST /v1/chat/completions HTTP/1.1\\r\\nhost: x\\r\\ncontent-length: 16"
        '\\r\\n\\r\\n{"messages": []}\'); s.close(); sys.exit(69)'
    ),
}


@pytest.mark.parametrize("name", EXCLUSIONS)
async def test_an_exclusion_can_not_be_provoked(attack: Attack, name: str) -> None:
    """By an agent that has taken over its harness altogether."""
    attacked = await attack("", Forged(f"{CALL}\n{EXCLUSIONS[name]}"), limit_s=20)
    assert attacked.result.outcome is ExecutionOutcome.COMPLETED, attacked.result.detail
    assert "left" in attacked.names
    assert isinstance(attacked.verdict().verdict, Scored)


@pytest.mark.parametrize("status", [500, 404, 400, 413, 429])
async def test_refusals_that_a_request_provokes_do_not_exclude(
    attack: Attack, gateway: StubGateway, status: int
) -> None:
    def after_the_first(history: object, headers: object) -> dict[str, object]:
        gateway.failures = [(status, {})]
        return {"role": "assistant", "content": "x"}

    gateway.policy = after_the_first
    attacked = await attack("", Forged(f"{CALL}\nask(); sys.exit(69)"), limit_s=20)
    assert attacked.result.outcome is ExecutionOutcome.COMPLETED, attacked.result.detail
    assert len(gateway.requests) == 2


async def test_a_model_that_is_really_gone_excludes(attack: Attack, gateway: StubGateway) -> None:
    """The other side of it: what the door has seen itself counts, whatever the exit code."""
    gateway.failures = [(503, {})] * 50
    attacked = await attack("", Forged(f"{CALL}\nsys.exit(0)"), limit_s=20)
    assert attacked.result.outcome is ExecutionOutcome.HOST_FAILED
    assert "503" in attacked.result.detail


async def test_sandboxes_do_not_see_each_other(attack: Attack) -> None:
    """Another execution's processes, workspace and door, all on the same machine."""
    program = (
        TRY
        + """
attempt('scratch', lambda: shell('ls -d /tmp/gyre-* /tmp/*/scratch'))
attempt('message', lambda: shell('ipcs -q | grep gyre'))
print('LEFT', os.path.exists('/dev/shm/left'), os.path.exists('/tmp/left'))
open('/dev/shm/left', 'w').close(); open('/tmp/left', 'w').close()
"""
    )
    attacked = await attack(program)
    assert "LEFT False False" in attacked.said
    assert refused(attacked.said.split("LEFT")[0], 2), attacked.said
    assert "left" not in names("/dev/shm") | names("/tmp")


async def test_time_can_not_be_bought(attack: Attack) -> None:
    """A harness that ignores every signal ends at its limit all the same."""
    program = """
import signal, time
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
open('left', 'w').close()
while True: time.sleep(1)
"""
    started = time.monotonic()
    attacked = await attack(program, limit_s=2)
    assert attacked.result.outcome is ExecutionOutcome.TIMED_OUT
    assert "left" in attacked.names
    assert attacked.result.ended_at - attacked.result.started_at < time.monotonic() - started
