"""Sessions, steps, loaders and state of a training: shared by the adapters, independent of any framework."""
