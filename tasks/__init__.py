"""The stages of a step: plain functions, and in each folder's task.py their Prefect tasks."""
