"""The daemon of one cell: its engine, its replica, and the role that it is in."""
