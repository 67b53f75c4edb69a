"""Defines errors, and reads and writes files.

It imports no other package.

json_forms.py    reads JSON into dataclasses, with messages that say the place
limited.py       annotations of forms: counts, positive numbers, finite numbers, texts
json_files.py    reads a JSON object from a file, and writes files whole or not at all
remote_files.py  files of object stores, whose requests are tried again
line_file.py     files of lines of JSON that grow, their locks, and what other settings are
log_file.py      lines of a log, on the terminal and in the folder of a run
text_table.py    tables as Markdown, and for terminals
progress_bar.py  a bar on a terminal, and a line now and then elsewhere
"""
