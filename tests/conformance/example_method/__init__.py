"""A method made for the tests, and the worked example of docs/adding_a_method.md: averages gradients, nothing else."""

import tests.conformance.example_method.lab  # noqa: F401 - registers what benchmarks and plans know of it
from tests.conformance.example_method.config import AveragingConfig
from tests.conformance.example_method.runtime import Averaging

__all__ = ["Averaging", "AveragingConfig"]
