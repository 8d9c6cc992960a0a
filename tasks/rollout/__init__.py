"""Executions: a harness on a problem in a workspace, owned by a daemon that outlives the flow."""
