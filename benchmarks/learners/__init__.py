"""Learners of parameter servers: hosts of different speed, and many learners in simulated time."""
