"""The diagnosis of a plan, its text and its figures say why a plan costs what it costs.

It makes no plan and measures nothing.
"""
