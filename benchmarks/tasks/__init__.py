"""Tasks that only the papers' experiments need: each adds itself to the tasks of ``bench converge``."""
