"""This is what is known of accesses to rows: measured profiles, Zipf and other distributions.

The data that they are measured on is in `datasets`.
"""
