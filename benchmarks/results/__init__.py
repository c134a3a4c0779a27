"""``make results``: the measurements that the docs show, from the command of each to its table.

A :class:`~.job.Job` is a command that anybody can type; what it measures is kept as ``docs/measured/JOB.json``. An
:class:`~.exhibit.Exhibit` is a table, a picture or a paper's claims, made of the files of one or more jobs alone. The
pages of the docs have tables between two marks (:mod:`~.pages`): nothing that was measured is written by hand.
The folder ``papers`` has a file of jobs and exhibits for each paper.
"""
