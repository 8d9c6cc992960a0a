"""Where problems come from and how what an agent left behind is tested."""
