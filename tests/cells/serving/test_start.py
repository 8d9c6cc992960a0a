"""Command, environment, failure and end of a server's process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cells.ports import free_port
from cells.serving.engine import EngineGoneError
from cells.serving.flags import EngineSettings, engine_argv, engine_environment
from cells.serving.launch import API_KEY
from cells.serving.process import EngineProcess
from cells.tls import Identity
from configs.cells import Device

SETTINGS = EngineSettings(
    policy=Path("/policy"),
    version=3,
    device=Device.CPU,
    context=512,
    kv_tokens=4096,
    requests=8,
    seed=5,
    port=1234,
    admin_key="secret-key",
)


def test_generations_want_a_key_where_others_can_reach_them() -> None:
    assert API_KEY not in engine_environment(SETTINGS, {})
    wide = replace(SETTINGS, host="10.0.0.1")
    assert engine_environment(wide, {})[API_KEY] == SETTINGS.admin_key
    identity = Identity(Path("c"), Path("k"), "ca")
    argv = " ".join(engine_argv(wide, identity))
    assert "--ssl-certfile c --ssl-keyfile k" in argv and SETTINGS.admin_key not in argv


def test_the_admin_key_is_not_on_the_command_line() -> None:
    assert not any("secret-key" in part for part in engine_argv(SETTINGS))
    assert "secret-key" in engine_environment(SETTINGS, {}).values()


def test_cpu_flags_are_left_to_sglang_on_a_gpu() -> None:
    on_cpu, on_gpu = (engine_argv(replace(SETTINGS, device=device)) for device in Device)
    assert "torch_native" in on_cpu
    assert not {"--device", "--dtype", "--attention-backend", "--sampling-backend"} & set(on_gpu)
    assert "SGLANG_USE_CPU_ENGINE" not in engine_environment(
        replace(SETTINGS, device=Device.CUDA), {}
    )


def test_byte_code_is_kept_whatever_the_caller_wants() -> None:
    env = engine_environment(SETTINGS, {"PYTHONDONTWRITEBYTECODE": "1", "PATH": "/bin"})
    assert "PYTHONDONTWRITEBYTECODE" not in env
    assert env["PATH"] == "/bin"


async def test_a_server_that_ends_at_once_is_told_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without the CPU engine's variable the stand-ins refuse, long before SGLang is imported.
    (tmp_path / "sitecustomize.py").write_text(
        "import os; os.environ.pop('SGLANG_USE_CPU_ENGINE', None)"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    settings = replace(SETTINGS, policy=tmp_path / "none", port=free_port())
    engine = EngineProcess(settings, cpus=(), log=tmp_path / "log")
    try:
        with pytest.raises(
            EngineGoneError, match=r"exit code 1: .*SGLANG_USE_CPU_ENGINE must"
        ) as e:
            await engine.wait_ready(60)
        assert "Traceback" not in str(e.value)
        assert engine.failure()
    finally:
        await engine.close()
        await engine.close()


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_children_die_with_a_parent_that_is_killed(how: str, tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(
        "import multiprocessing, os, signal, sys, time\n"
        "from cells.serving.family import end_with_parent\n"
        "if __name__ in ('__main__', '__mp_main__'):\n"
        "    end_with_parent()\n"
        "    os.register_at_fork(after_in_child=end_with_parent)\n"
        "def stay():\n"
        "    print(os.getpid(), flush=True)\n"
        "    time.sleep(600)\n"
        "if __name__ == '__main__':\n"
        "    multiprocessing.set_start_method(sys.argv[1])\n"
        "    multiprocessing.Process(target=stay).start()\n"
        "    time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-m", "parent", how],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path.cwd()}"},
    )
    assert parent.stdout is not None
    assert int(parent.stdout.readline()) != parent.pid
    parent.send_signal(signal.SIGKILL)
    parent.wait(10)
    assert parent.stdout.read() == b"", "ends when the last process that holds the pipe is gone"


def test_a_child_whose_parent_is_dead_already_ends_at_once() -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    code = "from cells.serving.family import end_with_parent; end_with_parent(); print('lives')"
    env = {**os.environ, "GYRE_ENGINE_PARENT": str(dead.pid)}
    child = subprocess.run(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, timeout=60
    )
    assert (child.stdout, child.returncode) == (b"", 1)
