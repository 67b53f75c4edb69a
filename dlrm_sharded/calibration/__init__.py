"""Chooses what is measured: random plans of a collection, plans of a task, those of a first start.

The measurements are made in `measuring`, and prices are fitted to them in `fitting`.
"""
