"""Settings of a run: one pydantic model, YAML presets, and the loader that merges them."""

from configs.load import ConfigError, load_config
from configs.run import RunConfig

__all__ = ["ConfigError", "RunConfig", "load_config"]
