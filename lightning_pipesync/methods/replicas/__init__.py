"""The engine of the methods whose ranks train replicas: global weights, averages, lost and returning replicas."""
