"""What a person starts and sees in Prefect, and the ``gyre`` command line."""
