"""From sealed groups to updates: objective, packing, ledger, and the stream over replicas."""
