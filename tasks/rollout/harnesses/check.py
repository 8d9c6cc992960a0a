"""Whether an installed client starts inside a sandbox, without a network."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from tasks.rollout.harnesses.client import Client
from tasks.rollout.harnesses.command import HarnessError
from tasks.rollout.sandboxes.sandbox import Room, Sandbox

_LIMIT_S = 120


def check_client(client: Client, sandbox: Sandbox) -> str:
    """What the client says of its version, which is the one that was asked for.

    Raises:
        HarnessError: it does not start, or it is another version.
    """
    with tempfile.TemporaryDirectory(prefix="gyre-check-") as made:
        room = Room(Path(made).resolve(), readable=(client.folder,))
        room.workspace.mkdir()
        argv = [*sandbox.prefix(room), *client.version_argv()]
        try:
            done = subprocess.run(
                argv,
                cwd=room.workspace,
                env=sandbox.environment(room),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_LIMIT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise HarnessError(f"{client.name} does not start in its sandbox: {error}") from error
    said = done.stdout.decode(errors="replace").strip()
    if done.returncode or client.version not in said:
        errors = done.stderr.decode(errors="replace").strip()[-1000:]
        raise HarnessError(
            f"{client.name}: asked for its version, {client.version}, it ended with code "
            f"{done.returncode} and said: {said[-1000:]} {errors}"
        )
    return said
