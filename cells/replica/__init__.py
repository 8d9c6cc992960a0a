"""The training replica of a cell: a Qwen3 policy in Megatron-core, one process."""
