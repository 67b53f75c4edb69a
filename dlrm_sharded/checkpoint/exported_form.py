"""The format of model.json, which says how to build an exported model from its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from dlrm_sharded.files.limited import Count, PositiveInt, Text

MODEL_FILE = "model.json"
DENSE_FILE = "dense.safetensors"
ENCODER_FOLDER = "encoder"
"""Names of files and folders in the folder of an exported model."""

TableFile = Annotated[str, Meta(pattern=r"\Atable-\d{5,}-of-\d{5,}\.safetensors\Z")]
Sizes = Annotated[tuple[PositiveInt, ...], Meta(min_length=1)]


@dataclass(frozen=True, slots=True)
class ExportedTable:
    """A table, the features that look it up, and the file of its weights."""

    name: Text
    num_embeddings: PositiveInt
    embedding_dim: PositiveInt
    features: tuple[Text, ...]
    file: TableFile


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedForm:
    """The content of model.json.

    Args:
        kind: function of `model.dlrm` that builds the model.
        dense_layers, over_layers, num_cross_layers, cross_rank: its arguments.
        num_dense: number of dense features.
        tables: the tables in the model's order.
        run, step: id of the run, and the number of steps that it had trained.
        versions: versions of the packages that exported the model.
    """

    format: Literal[1] = 1
    kind: Literal["dlrm", "dlrm_dcnv2"]
    dense_layers: Sizes
    over_layers: Sizes
    num_cross_layers: PositiveInt = 1
    cross_rank: PositiveInt = 1
    num_dense: PositiveInt
    tables: tuple[ExportedTable, ...]
    run: str
    step: Count
    versions: Mapping[str, str]
