"""The weights of a replica: which policy, which version, in and out of HF directories."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from cells.replica.errors import ReplicaError
from cells.replica.flat import FlatModel
from cells.replica.model import make_model
from cells.replica.passes import Passes
from cells.replica.place import LayoutError, Place, check_layout
from cells.replica.shape import PolicyShape, ShapeError, read_shape
from cells.replica.weights import WeightsError, files_beside, read_weights, write_policy


class Policy:
    """A model with all its weights and gradients in flat buffers.

    Args:
        shape: of the model; fixed, since its memory is registered for transfer.
        beside: the other files of its HF directory, for exports.
        place: which rank of the replica this is: it has only its part of the weights.
    """

    def __init__(
        self, shape: PolicyShape, beside: Mapping[str, bytes], place: Place | None = None
    ) -> None:
        self.shape = shape
        self.beside = dict(beside)
        self.place = place or Place()
        self.model = make_model(shape, self.place)
        self.passes = Passes(self.model, self.place)
        self.flat = FlatModel(self.model)
        self.version = 0

    @classmethod
    def open(cls, folder: Path, place: Place | None = None) -> Policy:
        """A policy of the shape of an HF directory, its weights not read yet.

        Raises:
            ReplicaError: no such directory, another architecture, or one that the layout can't cut.
        """
        try:
            shape = read_shape(folder / "config.json")
            place = place or Place()
            check_layout(place.layout, shape, str(folder / "config.json"))
            return cls(shape, files_beside(folder), place)
        except (ShapeError, LayoutError, OSError) as error:
            raise ReplicaError(str(error)) from error

    def read(self, folder: Path) -> tuple[dict[str, Tensor], dict[str, bytes]]:
        """Weights by Megatron name, and the other files, of an HF directory of the same shape.

        Raises:
            ReplicaError: another shape, or unusable weights.
        """
        try:
            shape = read_shape(folder / "config.json")
            if shape != self.shape:
                raise ReplicaError(
                    f"{folder}: {shape} differs from what this replica was started with, "
                    f"{self.shape}; start a new replica"
                )
            weights = read_weights(folder, shape, self.place)
            return weights, files_beside(folder)
        except (ShapeError, WeightsError, OSError) as error:
            raise ReplicaError(str(error)) from error

    def commit(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Replace all weights by name."""
        with torch.no_grad():
            for name, parameter in self.flat.named.items():
                parameter.copy_(weights[name])
        self.version = version

    def export(self, folder: Path) -> None:
        """Write an HF directory of the current weights, with the other ranks.

        Raises:
            ReplicaError: it can't be written.
        """
        weights = self.flat.split(self.flat.weights)
        try:
            write_policy(
                folder,
                weights,
                self.shape,
                self.beside,
                place=self.place,
                dtype=self.flat.weights.dtype,
                token=f"v{self.version}",
            )
        except OSError as error:
            raise ReplicaError(f"{folder}: can't be written: {error}") from error
