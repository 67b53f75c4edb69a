"""Why a plan costs what it costs: the diagnosis, its text and its figures.

It makes no plan and measures nothing.
"""
