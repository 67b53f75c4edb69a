"""Has measured and assumed distributions of accesses to rows.

The data is in `datasets`.
"""
