"""Where figures of a run go besides its own folder."""

from __future__ import annotations

from configs.field import Section, setting


class TrackingConfig(Section):
    """Trackers of experiments that get each update's figures and each evaluation."""

    tensorboard: bool = setting(
        True, "Event files for TensorBoard, in the folder tensorboard of the run."
    )
    wandb: str = setting(
        "",
        "Project of Weights & Biases; empty is none. Needs the extra wandb, and WANDB_API_KEY or "
        "WANDB_MODE=offline in the environment of the worker.",
        max_length=128,
    )
    mlflow: str = setting(
        "",
        "Address of an MLflow server, or a folder or database as MLflow names them; empty is none. "
        "Needs the extra mlflow; a password goes into the environment of the worker.",
        max_length=1024,
    )
