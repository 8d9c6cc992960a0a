"""Arguments of the commands, checked at the border."""

from __future__ import annotations

from pydantic import Field

from cells.replica.errors import ReplicaError
from cells.replica.groups import SampleRequest
from cells.replica.place import Place
from cells.transfer.block import Descriptor
from configs.field import Section

NAME = Field(min_length=1, max_length=256)
COUNT = Field(ge=0, le=1 << 40)


class Empty(Section):
    """No arguments."""


class LoadRequest(Section):
    path: str = Field(min_length=1, max_length=4096)
    version: int = COUNT


class PathRequest(Section):
    path: str = Field(min_length=1, max_length=4096)


class ShareRequest(Section):
    first: int = COUNT
    limit_bytes: int = Field(ge=1, le=1 << 40)


class PolicyRequest(Section):
    """Weights, as a command names them."""

    path: str = Field(min_length=1, max_length=4096)
    """HF directory."""
    version: int = COUNT


class AnchorRequest(Section):
    """The policies that a micro-step's objective needs besides the trained one."""

    proximal: PolicyRequest | None = None
    reference: PolicyRequest | None = None

    def named(self) -> dict[str, PolicyRequest]:
        """Those that are needed, by name."""
        both = {"proximal": self.proximal, "reference": self.reference}
        return {name: request for name, request in both.items() if request is not None}


class MicroStepRequest(Section):
    step: int = COUNT
    update: int = COUNT
    micro_step: str = NAME
    samples: tuple[SampleRequest, ...] = Field(min_length=1, max_length=1 << 20)
    anchors: AnchorRequest = AnchorRequest()


class UpdateRequest(Section):
    update: int = COUNT


class RankDescriptors(Section):
    """Blocks of the ranks of a replica, in order."""

    ranks: tuple[Descriptor, ...] = Field(min_length=1, max_length=65_536)
    nbytes: int = Field(ge=0)
    """Of all together."""
    version: int = COUNT


def block_of(descriptor: Descriptor | RankDescriptors, place: Place) -> Descriptor:
    """The block that a rank reads.

    Raises:
        ReplicaError: it is of a replica with another number of ranks.
    """
    blocks = descriptor.ranks if isinstance(descriptor, RankDescriptors) else (descriptor,)
    if len(blocks) != place.layout.ranks:
        raise ReplicaError(
            f"the block is of a replica of {len(blocks)} ranks, this one has {place.layout.ranks}"
        )
    return blocks[place.rank]


class ReduceRequest(Section):
    step: int | None = None
    """Of the update; left out, it goes with any."""
    update: int = COUNT
    descriptor: Descriptor | RankDescriptors
    micro_steps: tuple[str, ...] = Field(max_length=1 << 20)


class StepRequest(Section):
    step: int | None = None
    update: int = COUNT
    executions: int = Field(ge=1, le=1 << 40)
    learning_rate: float = Field(gt=0, le=1)


class PullRequest(Section):
    descriptor: Descriptor | RankDescriptors


class LogprobsRequest(Section):
    samples: tuple[SampleRequest, ...] = Field(min_length=1, max_length=1 << 20)
