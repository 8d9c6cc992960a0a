"""SGLang's processes as forks of one that has imported everything.

SGLang sets multiprocessing's start method to ``spawn``, as CUDA demands. Each of its processes then
imports torch and SGLang again: about ten seconds of a core and 400 MB, three times a server.
Without a GPU a fork is safe: the server forks before it starts threads, with OMP_NUM_THREADS=1
there is no thread pool to lose, and pages are shared until they are written.
"""

from __future__ import annotations

import gc
import multiprocessing


def fork_children() -> None:
    """Make ``spawn``, when SGLang asks for it, mean ``fork``. Call before SGLang starts."""
    choose = multiprocessing.set_start_method

    def choose_fork(method: str | None, force: bool = False) -> None:
        gc.collect()
        gc.freeze()  # a collection in a child would write to, and so copy, every page
        choose("fork" if method == "spawn" else method, force=force)

    multiprocessing.set_start_method = choose_fork
