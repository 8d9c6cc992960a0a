"""Published weights in two halves: readers of the last version are never written over."""

from __future__ import annotations

from torch import Tensor

from cells.transfer.block import Block, Descriptor
from cells.transfer.endpoint import Endpoint


class Publication:
    """A double buffer of served blocks.

    A version is published into the half that the one before it does not occupy. So a reader has
    the time of a whole update to finish; one that is slower sees that the header has changed.
    """

    def __init__(self, endpoint: Endpoint, nbytes: int) -> None:
        self._endpoint = endpoint
        self._halves = (Block(nbytes), Block(nbytes))
        for half in self._halves:
            endpoint.serve(half)
        self._next = 0
        self.current: Descriptor | None = None

    def publish(self, weights: Tensor, version: int) -> Descriptor:
        """Copy ``weights`` (of the size of a half) and describe the copy.

        The version that is published already is described again, not copied again.
        """
        if self.current is not None and self.current.version == version:
            return self.current
        half = self._halves[self._next]
        half.open()
        half.payload.view(weights.dtype).copy_(weights.detach())
        self.current = self._endpoint.publish(half, version)
        self._next = 1 - self._next
        return self.current

    def forget(self) -> None:
        """Publish anew even if the version's number is the same: other weights have been loaded."""
        self.current = None
