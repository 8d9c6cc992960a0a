"""What keeps an agent's commands away from the machine, over one small interface."""
