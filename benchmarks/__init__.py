"""The papers' experiments, as far as one machine repeats them, and measurements of this package.

Run them in a checkout: ``python -m benchmarks.NAME``. They import the package, which never imports them. What each
measures, docs/benchmarks.md says. ``python -m benchmarks.results`` runs the jobs whose numbers the docs show.
"""
