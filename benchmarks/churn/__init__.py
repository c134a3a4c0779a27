"""Replicas that are killed and come back, beside torchft's DiLoCo."""
