"""Defines errors, and reads and writes files.

It imports no other package.

json_forms.py    reads JSON into dataclasses; error messages name the place in the JSON
limited.py       types for forms: counts, positive numbers, finite numbers, texts
json_files.py    reads a JSON object from a file, and writes files completely or not at all
remote_files.py  files in object stores, with retries
line_file.py     growing files of JSON lines, locks, and differences of settings
log_file.py      the log file of a run
text_table.py    tables in Markdown and for terminals
progress_bar.py  a bar on a terminal, and an occasional line elsewhere
"""
