"""Scores samples with an exported model; it needs torch, but neither TorchRec nor FBGEMM.

Letters: B samples, N ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from dlrm_sharded.checkpoint.exported_form import (
    DENSE_FILE,
    ENCODER_FOLDER,
    MODEL_FILE,
    ExportedForm,
)
from dlrm_sharded.datasets.columns import ParsedRows, parse
from dlrm_sharded.datasets.encoder import ColumnEncoder
from dlrm_sharded.files.errors import DataError, shortened
from dlrm_sharded.files.json_files import read_json_object
from dlrm_sharded.files.json_forms import read_form
from dlrm_sharded.model.dense_layers import DenseLayers, OverLayers
from dlrm_sharded.model.interaction import CrossInteraction, DotInteraction
from dlrm_sharded.model.vector_stack import VectorStack
from dlrm_sharded.plans.tables import Table, tables_by_feature

Ids = tuple[Tensor, Tensor]
"""Ids [N] of a feature in all samples, one sample after the other, and the offsets [B] at which
each sample's ids begin."""

PIECE_ROWS = 8192
"""Largest number of rows whose vectors are in memory at a time."""


class ExportedModel:
    """A model whose tables stay on disk until their rows are looked up.

    Args:
        tables: the tables in the model's order.
        weights: weights of each table, [rows, columns], by name.
        layers: all layers except the tables, under their names in a `Dlrm`.
        encoder: encoder of the training columns; None if it was not exported.
    """

    def __init__(
        self,
        num_dense: int,
        tables: tuple[Table, ...],
        weights: Mapping[str, Tensor],
        layers: nn.ModuleDict,
        encoder: ColumnEncoder | None,
    ) -> None:
        self.num_dense = num_dense
        self.tables = tables
        self._weights = weights
        self._layers = layers
        self._encoder = encoder

    def __call__(self, columns: Any) -> Tensor:
        """Return the probabilities [B] that labels are 1, for rows with the columns of training.

        Args:
            columns: a data frame of polars or pandas, or values by column.

        Raises:
            DataError: a column is missing, or has values that training would refuse.
        """
        if self._encoder is None:
            raise DataError(
                f"the export has no {ENCODER_FOLDER}; give dense features and table rows to "
                "`predict`"
            )
        rows, schema = pl.DataFrame(columns), self._encoder.schema
        if missing := [c for c in (*schema.dense, *schema.categorical) if c not in rows.columns]:
            raise DataError(f"there is no column {missing[0]!r}, which the model was trained with")
        found = [torch.empty(0)]
        for start in range(0, len(rows), PIECE_ROWS):
            parsed = parse(piece := rows.slice(start, PIECE_ROWS), schema, with_label=False)
            for fault in parsed.faults:
                row = int(fault.rows.argmax())
                raise DataError(
                    f"column {fault.column!r} has {shortened(piece[fault.column][row])} in row "
                    f"{start + row}, counted from 0, and must have {fault.must}"
                )
            found.append(self.predict(*_tensors(self._encoder, parsed)))
        return torch.cat(found)

    @torch.inference_mode()
    def predict(self, dense: Tensor, ids: Mapping[str, Ids]) -> Tensor:
        """Return the probabilities [B] that labels are 1.

        Args:
            dense: [B, num_dense] fp32.
            ids: ids of each feature, see `Ids`.

        Raises:
            DataError: a feature is missing, or has ids beyond its table's rows.
        """
        if dense.ndim != 2 or dense.shape[1] != self.num_dense:
            raise DataError(f"dense is {[*dense.shape]}, and must be [B, {self.num_dense}]")
        table_of = tables_by_feature(self.tables)
        if missing := table_of.keys() - ids:
            raise DataError(f"ids lack the features {sorted(missing)}, which the model looks up")
        pooled = [self._pooled(name, *ids[name], table) for name, table in table_of.items()]
        stack, dims = self._layers["vector_stack"], [t.embedding_dim for t in table_of.values()]
        assert isinstance(stack, VectorStack)
        embedded = self._layers["dense_arch"](dense)
        vectors = stack.stacked(embedded, [*table_of], dims, torch.cat(pooled, dim=1))
        logits = self._layers["over_arch"](self._layers["inter_arch"](vectors))
        return torch.sigmoid(logits).squeeze(-1)

    def _pooled(self, feature: str, ids: Tensor, offsets: Tensor, table: Table) -> Tensor:
        """Return [B, columns], the sum of the vectors of each sample's ids."""
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < table.num_embeddings:
            raise DataError(
                f"feature {feature!r} has ids from {int(ids.min()):,} to {int(ids.max()):,}, while "
                f"table {table.name!r} has the rows 0 to {table.num_embeddings - 1:,}"
            )
        weights = self._weights[table.name]
        if weights.dtype != torch.float32:  # the sums are in fp32
            ids, weights = torch.arange(ids.numel()), weights[ids.long()].float()
        return F.embedding_bag(ids, weights, offsets.to(ids.dtype), mode="sum")


def load_exported(folder: str | Path) -> ExportedModel:
    """Load a model that `dlrm-export` wrote.

    Raises:
        DataError: the folder has no model.json, or one of its files is damaged.
    """
    folder = Path(folder)
    path = folder / MODEL_FILE
    if not path.exists():
        raise DataError(f"{path} is missing; export the run again with dlrm-export")
    fields = read_json_object(path, noun="exported model")
    form = read_form(fields, ExportedForm, name=str(path))
    tables = tuple(
        Table(
            table.name,
            table.num_embeddings,
            table.embedding_dim,
            pooling_factor=0.0,
            num_features=len(table.features),
            features=table.features,
        )
        for table in form.tables
    )
    layers = _layers(form, tables)
    try:
        layers.load_state_dict(load_file(folder / DENSE_FILE), assign=True)
        weights = {
            table.name: load_file(folder / table.file)[f"tables.{table.name}.weight"].view(
                table.num_embeddings, table.embedding_dim
            )
            for table in form.tables
        }
        has_encoder = (folder / ENCODER_FOLDER).exists()
        encoder = ColumnEncoder.load(folder / ENCODER_FOLDER) if has_encoder else None
    except (OSError, KeyError, RuntimeError, ValueError, SafetensorError) as error:
        raise DataError(f"{folder} is damaged: {error}; export the model again") from error
    return ExportedModel(form.num_dense, tables, weights, layers, encoder)


def _tensors(encoder: ColumnEncoder, parsed: ParsedRows) -> tuple[Tensor, dict[str, Ids]]:
    """Return the arguments of `predict`."""
    rows = encoder.encode(parsed)
    ids: dict[str, Ids] = {}
    for name, values in zip(encoder.single, rows.ids, strict=True):
        ids[name] = torch.from_numpy(values), torch.arange(len(values))
    for name, lengths, values in zip(encoder.lists, rows.lengths, rows.values, strict=True):
        ids[name] = torch.from_numpy(values), torch.from_numpy(lengths.cumsum() - lengths)
    return torch.from_numpy(rows.dense), ids


def _layers(form: ExportedForm, tables: tuple[Table, ...]) -> nn.ModuleDict:
    """Return the layers of a model except the tables, without weights."""
    num_vectors, dim = 1 + len(tables_by_feature(tables)), form.dense_layers[-1]
    interaction: nn.Module
    with torch.device("meta") as meta:
        if form.kind == "dlrm":
            interaction = dot = DotInteraction(num_vectors, device=torch.device("cpu"))
            width = dim + dot.num_pairs
        else:
            interaction = CrossInteraction(
                num_vectors, dim, num_layers=form.num_cross_layers, rank=form.cross_rank
            )
            width = num_vectors * dim
        return nn.ModuleDict(
            {
                "dense_arch": DenseLayers(form.num_dense, form.dense_layers),
                "vector_stack": VectorStack(tables, dim, device=meta),
                "inter_arch": interaction,
                "over_arch": OverLayers(width, form.over_layers),
            }
        )
