"""Compares the plans of several sharders for the same tasks.

Training runs are compared in `runs`.

cases.py                plans cases in processes of their own, and keeps outcomes in a folder
plan_measurements.py    measures the ranks of all plans of a task in rounds
scores.py               entries as rows of frames, by plan and by rank; scores of sharders
summary.py              the scores as text and as a plot, and all files of a contest
"""
