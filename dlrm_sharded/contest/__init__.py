"""Gives the same tasks to several sharders, and compares their plans under the same prices.

Runs of a training are compared in `runs`.

entry.py        a case (a task for a sharder), the entry that comes of it, and a measurement
cases.py        cases in processes of their own, whose entries a folder keeps
measure.py      measures the ranks of all plans of a task in rounds
score.py        what the entries say of each sharder
report.py       the scores as text, and all files of a contest
tables.py       entries as tables for programs: by task, by plan, by rank, by shard
figures.py      the scores as a picture
"""
