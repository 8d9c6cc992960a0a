"""A process that publishes 0, 1, 2 ... as version 3 and then does what its input says.

Answers every line with one: the current descriptor.
"""

from __future__ import annotations

import sys

import torch

from cells.transfer.endpoint import Endpoint
from cells.transfer.publication import Publication


def main() -> None:
    weights = torch.arange(int(sys.argv[1]), dtype=torch.float32)
    publication = Publication(Endpoint(), weights.nbytes)
    version = 3
    descriptor = publication.publish(weights, version)
    print(descriptor.model_dump_json(), flush=True)
    for line in sys.stdin:
        if line.strip() == "publish":
            version += 1
            descriptor = publication.publish(weights + (version - 3), version)
        elif line.strip() == "corrupt":
            # The half that the descriptor speaks of; only a fault writes into it.
            half = next(h for h in publication._halves if h.memory.data_ptr() == descriptor.address)
            half.payload[-1] ^= 1
        print(descriptor.model_dump_json(), flush=True)


if __name__ == "__main__":
    main()
