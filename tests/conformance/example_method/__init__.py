"""A method made for the tests, and the worked example of docs/adding_a_method.md: averages gradients, nothing else."""

from tests.conformance.example_method.config import AveragingConfig
from tests.conformance.example_method.runtime import Averaging

__all__ = ["Averaging", "AveragingConfig"]
