"""Pipelines of small classifiers, all stages in one process."""
