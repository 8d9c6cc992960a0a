"""The process that holds the agent's code and says what its functions return.

It is sent as text to ``python -I -S -c`` inside the sandbox, so it uses the standard library only,
and little of it: an evaluation costs not much more than the start of an interpreter, and ``json``
alone would cost as much again. It never learns what a test expects: whatever the code does to this
process, it can only make it answer something else, and right answers are all that counts.

In, a Python literal per line: ``("load", path)`` or ``("call", path, function, [[...], ...])``.
Out, JSON per line: ``{"ready": true}`` at the start, then for each line in ``{"values": [...]}`` or
``{"error": "<Type>"}``. A tuple, set or dictionary is ``{"tuple": [...]}``, ``{"set": [...]}`` or
``{"dict": [[key, value], ...]}``.
"""

import os
import resource
import sys
from _json import encode_basestring_ascii as quoted

SOURCE_LIMIT_BYTES = 1 << 20
MODULES: dict[str, dict[str, object]] = {}


def load(path: str) -> None:
    """Run the module at ``path`` (relative to the working folder) once."""
    if path in MODULES:
        return
    with open(path, "rb") as file:
        source = file.read(SOURCE_LIMIT_BYTES)
    name = path.removesuffix(".py").replace("/", ".")
    module = type(sys)(name)
    module.__file__ = path
    sys.modules[name] = module
    exec(compile(source, path, "exec"), module.__dict__)  # noqa: S102 - what this process is for
    MODULES[path] = module.__dict__


def encoded(value: object) -> str:
    """A value as JSON. TypeError for one that no test expects."""
    if value is None or value is True or value is False:
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        return float.__repr__(value)
    if isinstance(value, list):
        return "[" + ", ".join([encoded(item) for item in value]) + "]"
    if isinstance(value, tuple):
        return '{"tuple": ' + encoded(list(value)) + "}"
    if isinstance(value, dict):
        return '{"dict": ' + encoded([[key, item] for key, item in value.items()]) + "}"
    if isinstance(value, set | frozenset):
        return '{"set": ' + encoded(list(value)) + "}"
    raise TypeError


def answer(line: bytes) -> str:
    """The reply to one request. Errors of the agent's code, exits included, are a reply too."""
    try:
        # The request is a literal that the evaluation wrote; the agent's code has no way to send.
        kind, path, *rest = eval(line)
        if kind == "load":
            load(path)
            return '{"values": []}'
        function, arguments = rest
        values = [MODULES[path][function](*row) for row in arguments]  # type: ignore[operator]
        return '{"values": ' + encoded(values) + "}"
    except BaseException as error:  # noqa: BLE001 - sys.exit of the agent's code must not end us
        return '{"error": ' + quoted(type(error).__name__) + "}"


def main(memory_mb: int, cpu_s: int) -> None:
    """Answer until the input ends."""
    for kind, most in (
        (resource.RLIMIT_AS, memory_mb << 20),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, 1 << 24),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))
    # The agent's code gets neither the requests nor the replies: its own standard streams go
    # nowhere.
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - pathlib is slow to import
    sys.dont_write_bytecode = True
    os.write(replies, b'{"ready": true}\n')
    for line in requests:
        reply = memoryview(answer(line).encode() + b"\n")
        while reply:
            reply = reply[os.write(replies, reply) :]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
