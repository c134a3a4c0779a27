"""Drills: faults in small trainings, which must survive them, or end by naming the culprit, and be resumable."""
