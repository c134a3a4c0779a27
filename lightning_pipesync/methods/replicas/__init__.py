"""The engine of the methods whose ranks train replicas: agreed weights, averages, lost and returning replicas."""
