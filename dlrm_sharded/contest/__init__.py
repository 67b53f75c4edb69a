"""Gives the same tasks to several sharders, and compares their plans under the same prices.

Runs of a training are compared in `runs`.

entry.py        a case (a task for a sharder), and the entry that comes of it
cases.py        cases in processes of their own, whose entries a folder keeps
measure.py      measures the ranks of all plans of a task in rounds, for a measurement.py
score.py        what the entries say of each sharder
tables.py       entries as tables for programs: by task, by plan, by rank, by shard
report.py       all files of a contest
score_text.py, figures.py  scores as text, and as a picture
"""
