"""Processes of a server that die with the one that started them, however it dies."""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_ENVIRONMENT = "GYRE_ENGINE_PARENT"


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends.

    SGLang asks for the same, but only after some ten seconds of imports: a scheduler whose server
    is killed before that would stay for ever. A parent that died before this call is noticed by
    its id, which each process of the server leaves to its children in the environment.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = os.environ.get(_ENVIRONMENT, "")
    os.environ[_ENVIRONMENT] = str(os.getpid())
    if not parent.isdigit():
        return
    with suppress(PermissionError):
        try:
            os.kill(int(parent), 0)
        except ProcessLookupError:
            os._exit(1)
