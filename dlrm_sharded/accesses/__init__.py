"""What is known of accesses to rows: measured profiles, Zipf and other distributions, miss ratios
of caches.

The data that they are measured on is in `datasets`.

The data that they are measured on is in `datasets`.
"""
