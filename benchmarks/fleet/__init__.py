"""A fleet in simulated time: what slices a policy orders, when they come, and how requests fare meanwhile."""
