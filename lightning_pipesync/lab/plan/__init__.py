"""``pipesync plan``: what a step takes with each method, on these hosts and with this model, and what to type."""
