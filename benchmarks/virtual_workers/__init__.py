"""Trainings of many workers in one process, with the decisions, codecs and settings of the real methods.

Weights are the rows of a matrix, a row a worker, and all rows take a step at once by ``torch.func``. So trainings with
64 workers that converge take minutes on one processor, several seeds together.
"""
