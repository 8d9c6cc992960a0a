"""Weights and gradients between replicas, through Mooncake's Transfer Engine."""
