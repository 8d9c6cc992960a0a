"""What token sequences begin with in common. Without torch: the flow process asks too."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

SHARE_FROM = 8
"""Shorter common prefixes are not worth a mask in the attention."""


def sort_key(ids: npt.NDArray[np.int32]) -> bytes:
    """Bytes that sort like the ids, which are not negative; a prefix comes before what extends it.

    In this order, what a sequence shares with all those before is what it shares with its
    predecessor.
    """
    return ids.astype(">u4").tobytes()


def shared_prefix(left: npt.NDArray[np.int32], right: npt.NDArray[np.int32]) -> int:
    """Length of the common prefix; 0 where it is shorter than ``SHARE_FROM``."""
    limit = min(len(left), len(right))
    differs = left[:limit] != right[:limit]
    common = int(differs.argmax()) if differs.any() else limit
    return common if common >= SHARE_FROM else 0
