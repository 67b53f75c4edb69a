"""The costs of this hardware: what is measured to know them, the store of samples, and the fit of a
cost model to all of them.

The stages of a plan are measured in `measuring`.
"""
