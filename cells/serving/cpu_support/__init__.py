"""What SGLang needs to run on a machine without a GPU. Seen to work with SGLang 0.5.23.

SGLang imports packages that only exist for GPUs when its modules are loaded, also where nothing of
them is used afterwards. ``install`` puts stand-ins in their place. It must run in every process of
the server before ``sglang`` is imported; ``cells.serving.launch`` sees to that.
"""

from cells.serving.cpu_support.children import fork_children
from cells.serving.cpu_support.conditions import CpuSupportError, check_conditions
from cells.serving.cpu_support.kv_pool import KvPoolFinder
from cells.serving.cpu_support.stand_ins import StandInFinder

__all__ = ["CpuSupportError", "fork_children", "install"]


def install() -> None:
    """Make ``import sglang`` work without a GPU in this process. Installing twice is harmless.

    Raises:
        CpuSupportError: this SGLang was not seen to work so, or there is a GPU.
    """
    check_conditions()
    StandInFinder.install()
    KvPoolFinder.install()
