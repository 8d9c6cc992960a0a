"""The compiled form of the program that runs first inside a sandbox."""

from __future__ import annotations

import importlib.util
import marshal
from functools import lru_cache

from tasks.rollout.sandboxes import entry

_HEADER_BYTES = 12
"""What follows the magic number of a .pyc file: flags, and two fields of its source."""


@lru_cache(maxsize=1)
def program() -> bytes:
    """Contents of a .pyc file: compiling it for each start would take longer than running it."""
    with open(entry.__file__, encoding="utf-8") as file:
        code = compile(file.read(), "entry.py", "exec", optimize=2, dont_inherit=True)
    return importlib.util.MAGIC_NUMBER + bytes(_HEADER_BYTES) + marshal.dumps(code)
