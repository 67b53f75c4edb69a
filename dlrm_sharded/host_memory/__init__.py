"""Tables in host memory, whose recent rows GPUs cache: miss ratios, prices, and the choice and
placement of such tables, which no GPU has measured yet.

The sharder that falls back on it is in `sharders`.
"""
