"""``python -m cells.serving.launch FLAGS``: SGLang's own server, with what the machine lacks.

All flags are SGLang's; the keys come in variables, because every user of a machine sees the flags
of a process. With ``--device cpu`` the stand-ins of ``cells.serving.cpu_support`` are
installed first; with another device this is stock SGLang (not run on a GPU).
"""

from __future__ import annotations

import os
import sys

from cells.serving.cpu_support import fork_children, install
from cells.serving.family import end_with_parent

ADMIN_KEY = "GYRE_ENGINE_ADMIN_KEY"
API_KEY = "GYRE_ENGINE_API_KEY"
FLAGS = {ADMIN_KEY: "admin-api-key", API_KEY: "api-key"}


def serve_on_cpu(flags: list[str]) -> None:
    """Serve on a machine without a GPU until a signal comes."""
    install()
    fork_children()
    serve(flags)


def serve(flags: list[str]) -> None:
    """Stock SGLang, until a signal comes."""
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args(flags))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _on_cpu(flags: list[str]) -> bool:
    return "--device" in flags[:-1] and flags[flags.index("--device") + 1] == "cpu"


if __name__ in ("__main__", "__mp_main__"):
    # multiprocessing's spawn, which stock SGLang uses, imports this module in its children under
    # the second name, before anything of SGLang's.
    end_with_parent()
    os.register_at_fork(after_in_child=end_with_parent)

if __name__ == "__main__":
    given = sys.argv[1:]
    for variable, flag in FLAGS.items():
        if variable in os.environ:
            # As one word: a key that begins with a dash would be taken for another flag.
            given.append(f"--{flag}={os.environ.pop(variable)}")
    if _on_cpu(given):
        serve_on_cpu(given)
    else:
        serve(given)
