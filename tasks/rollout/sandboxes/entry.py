"""The first program inside a sandbox: it hands out what the host needs and becomes the command.

As a program (``python -I -S entry.pyc GATE PORT LIMITS -- COMMAND...``) it sends two descriptors
through the gate, a socket that listens on ``PORT`` of the sandbox's own loopback device and the
folder of its workspace, then waits for one byte. What it hands out outlives it: the host serves the
socket without a relay that the agent could end, and reads the workspace when nothing runs any more.

Standard library only, and little of it: it is started for every execution.
"""

import _socket as socket
import marshal
import os
import resource
import sys

BACKLOG = 128
READY = b"r"
GO = b"g"


def open_gate(where: str) -> "socket.socket":
    """The connection to the host: an inherited descriptor, or the path of a socket."""
    if where.isdigit():
        return socket.socket(fileno=int(where))
    gate = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    gate.connect(where)
    return gate


def hand_out(gate: "socket.socket", port: int) -> None:
    """Send the listener and the working folder, and wait until the host has filled the latter."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", port))
    listener.listen(BACKLOG)
    folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    sent = b"".join(number.to_bytes(4, sys.byteorder) for number in (listener.fileno(), folder))
    gate.sendmsg([READY], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, sent)])
    if gate.recv(1) != GO:
        raise SystemExit("the host has closed the gate")
    os.close(folder)
    listener.close()
    gate.close()


def become(command: list[str]) -> None:
    """Run the command in place of this program."""
    if command[:3] == [sys.executable, "-I", "-S"] and command[3].endswith(".pyc"):
        # It asks for just such an interpreter as runs already: a start of one costs as much as all
        # the rest of a sandbox.
        with open(command[3], "rb") as file:
            code = marshal.loads(file.read()[16:])
        sys.argv = command[3:]
        exec(code, {"__name__": "__main__"})  # noqa: S102
    else:
        os.execvp(command[0], command)


def main(gate: str, port: str, limits: str) -> None:
    """``limits``: ``NAME=VALUE`` of resource limits, with commas between them."""
    for limit in filter(None, limits.split(",")):
        name, _, value = limit.partition("=")
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (int(value), int(value)))
    hand_out(open_gate(gate), int(port))


if __name__ == "__main__":
    main(*sys.argv[1:4])
    become(sys.argv[5:])
