"""Inspect files of columns and convert them to the blocks that training reads: `dlrm-data`.

    dlrm-data inspect 'clicks/*.parquet'                     writes schema.yaml, with reasons
    dlrm-data convert 'clicks/*.parquet' schema=schema.yaml  writes schema.blocks

The files are Parquet, CSV or TSV, plain or compressed; folders and globs name several, in the order
of their rows. Training converts files that are not converted yet; `convert` does it in advance.
A conversion that was stopped continues with the file at which it stopped.

    inspect:
    label                 column of 0 and 1; by default one with a usual name, such as label
    separator             of the columns in text files: by default a comma, a tab in .tsv, .txt
    out                   yaml file to write [schema.yaml]

    convert:
    schema                yaml file of the schema
    out                   folder to write; by default next to the schema
    validation_files      files for validation: [day_22.tsv,day_23.tsv]
    val_share             share of the last rows for validation, without validation_files [0.1]
    block_rows            samples in a block [2048]
    max_malformed_share   share of a file's rows that may be malformed [0.001]
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from dlrm_sharded.commands.exit_codes import exit_codes
from dlrm_sharded.commands.words import read_words
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.files.json_files import check_file_to_write, folder_to_write, replace_file
from dlrm_sharded.files.text_table import Column, TextTable, quantity

CONVERT_KEYS = (
    *("schema", "out", "validation_files", "val_share", "block_rows", "max_malformed_share"),
)
ACTIONS = {"inspect": ("label", "separator", "out"), "convert": CONVERT_KEYS}

COLUMNS = (
    *("column", "type", Column("different", ",", ">"), Column("missing", ".1%", ">")),
    *("becomes", "because"),
)


def main() -> None:
    with exit_codes():
        action = sys.argv.pop(1) if len(sys.argv) > 1 and sys.argv[1] in ACTIONS else None
        words, keys = read_words(__doc__, ACTIONS.get(action or "", ()), names="inspect or convert")
        if action is None:
            raise ConfigError(f"{words[0]} is neither inspect nor convert; --help shows how")
        logging.basicConfig(format="%(message)s")
        logging.getLogger("dlrm_sharded").setLevel(logging.INFO)
        _inspect(words, **keys) if action == "inspect" else _convert(words, **keys)


def _inspect(
    files: list[str],
    label: str | None = None,
    separator: str | None = None,
    out: str = "schema.yaml",
) -> None:
    check_file_to_write("out", out)
    if Path(out).exists():
        raise ConfigError(f"{out} exists already; give another out=, or remove it")
    from dlrm_sharded.datasets.inspection import inspect, proposed_schema
    from dlrm_sharded.datasets.schema import schema_yaml
    from dlrm_sharded.datasets.source_files import find_files

    reports = inspect(find_files("FILES", files), label, separator)
    schema = proposed_schema(reports, separator)
    rows = [(r.name, r.dtype, r.num_distinct, r.missing, r.kind, r.why) for r in reports]
    print(TextTable(COLUMNS, rows).text())
    comments = {one.name: one.why for one in reports}
    replace_file(out, schema_yaml(schema, comments).encode())
    print(
        f"\n{out} is written; correct it where a column is something else, and then:\n"
        f"  dlrm-train data=table 'data.files=[{','.join(files)}]' data.schema={out}"
    )


def _convert(
    files: list[str], schema: str | None = None, out: str | None = None, **options: Any
) -> None:
    if schema is None:
        raise ConfigError("name the schema; `dlrm-data inspect FILES` writes one")
    from dlrm_sharded.datasets.block_reader import BlockReader
    from dlrm_sharded.datasets.conversion import convert
    from dlrm_sharded.datasets.schema import read_schema
    from dlrm_sharded.datasets.table_source import TableSource

    source = TableSource(files, read_schema(schema), **options)
    folder = folder_to_write("out", out) if out else source.blocks_beside(schema)
    convert(source, folder)
    print(f"{folder}: {quantity(BlockReader(folder).manifest.num_rows, 'sample')}")


if __name__ == "__main__":
    main()
