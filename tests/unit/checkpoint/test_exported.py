"""Exported models give the probabilities of the models that were trained."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch

from dlrm_sharded import load_exported
from dlrm_sharded.checkpoint import exported as exported_module
from dlrm_sharded.checkpoint.exported import ExportedModel
from dlrm_sharded.checkpoint.logical import LogicalTensor
from dlrm_sharded.checkpoint.manifest import read_manifest
from dlrm_sharded.checkpoint.weights_export import export
from dlrm_sharded.datasets.base import encoder_folder
from dlrm_sharded.datasets.encoder import encoder_digest
from dlrm_sharded.datasets.table_dataset import TableDataset
from dlrm_sharded.files.errors import DataError
from dlrm_sharded.model.dlrm import Dlrm
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.ranks.distributed import Rank
from tests.preloaded import ROOT
from tests.unit.checkpoint.cases import write
from tests.unit.damage import change_a_byte, cut_off
from tests.unit.model.test_dlrm import CROSS, LAYERS, MIXED, NUM_DENSE, SHARED, batch, make

KINDS = {"dlrm": ("dot", LAYERS), "dlrm_dcnv2": ("dcnv2", {**LAYERS, **CROSS})}
COLUMNS = pl.DataFrame(
    {
        "clicked": [0, 1] * 30,
        "price": [None if i % 7 == 0 else i * 1.5 for i in range(60)],
        "age": [20 + i % 40 for i in range(60)],
        "city": [None if i % 11 == 0 else f"city {i % 9}" for i in range(60)],
        "weekday": [i % 7 for i in range(60)],
        "device": [f"d{i % 5}" for i in range(60)],
        "item": [i % 13 for i in range(60)],
        "seen": [[j % 13 for j in range(i % 4)] for i in range(60)],
        "session": [f"s{i}" for i in range(60)],
    }
)
SCHEMA = {
    "label": "clicked",
    "key": ["session"],
    "dense": {"price": {"log": True, "standardize": True}, "age": {"clip": [25, 50]}},
    "categorical": {
        "city": {"dim": 4},
        "seen": {"table": "item", "longest": 2},
        "weekday": {"ids": "as_is", "rows": 7},
        "device": {"ids": "hash", "rows": 20, "dim": 12},
        "item": {"min_count": 1},
    },
    "dim": 8,
}


def checkpoint_of(
    model: Dlrm,
    tables: tuple[Table, ...],
    run_dir: Path,
    rank: Rank,
    *,
    kind: str = "dlrm",
    encoder: str | None = None,
    digest: str | None = None,
    precision: torch.dtype = torch.float32,
) -> Path:
    """Write a checkpoint of a model on one rank."""
    state = {}
    for name, tensor in model.state_dict().items():
        _, is_table, table = name.partition("embedding_bags.")
        key = f"tables.{table}" if is_table else f"dense.{name}"
        state[key] = LogicalTensor.whole(tensor.to(precision) if is_table else tensor)
    config = {"model": {"_target_": f"dlrm_sharded.model.dlrm.{kind}", **KINDS[kind][1]}}
    names = ("name", "num_embeddings", "embedding_dim")
    described = {
        "num_dense": model.dense_arch._linears[0].in_features,
        "tables": [
            {n: getattr(t, n) for n in names} | {"features": t.feature_names} for t in tables
        ],
        "encoder": encoder,
        "encoder_digest": digest,
    }
    return write(run_dir, rank, state=state, config=config, model=described)


def predicted(model: ExportedModel, example: Batch) -> Tensor:
    features = example.sparse_features.to_dict()
    ids = {name: (of.values(), of.offsets()[:-1]) for name, of in features.items()}
    return model.predict(example.dense_features, ids)


def trained(kind: str, tables: tuple[Table, ...], **changes: Any) -> Dlrm:
    model = make(KINDS[kind][0], tables, **changes)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)  # also biases, which begin as zeros
    return model


@pytest.fixture
def exported(tmp_path, rank) -> Path:
    """A model with neither schema nor shared tables."""
    checkpoint = checkpoint_of(trained("dlrm", MIXED), MIXED, tmp_path / "run", rank)
    export(read_manifest(checkpoint), tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("precision", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("tables", [MIXED, SHARED], ids=["mixed", "shared"])
@pytest.mark.parametrize("kind", KINDS)
def test_probabilities_are_the_models(tmp_path, rank, kind, tables, precision):
    model = trained(kind, tables)
    with torch.no_grad():
        for table in model.sparse_arch.parameters():
            table.copy_(table.to(precision))
    _, (_, logits, _) = model(batch(tables))
    checkpoint = checkpoint_of(model, tables, tmp_path, rank, kind=kind, precision=precision)
    export(read_manifest(checkpoint), tmp_path / "model")
    state = torch.get_rng_state()
    loaded = load_exported(tmp_path / "model")
    found = predicted(loaded, batch(tables))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, logits.sigmoid(), rtol=0, atol=1e-6)
    assert logits.std() > 0.02
    assert torch.equal(torch.get_rng_state(), state)


def test_tables_are_mapped_into_memory(exported):
    model = load_exported(exported)
    for weights in model._weights.values():
        (path,) = [
            path
            for bounds, *_, path in map(str.split, Path("/proc/self/maps").read_text().splitlines())
            if weights.data_ptr() in range(*(int(bound, 16) for bound in bounds.split("-")))
        ]
        assert Path(path).parent == exported


def test_the_description_of_a_model(exported):
    form = json.loads((exported / "model.json").read_text())
    versions = form.pop("versions")
    assert versions.keys() == {"dlrm_sharded", "torch"}
    assert form.pop("tables")[1] == {
        **{"name": "t1", "num_embeddings": 21, "embedding_dim": 8, "features": ["t1"]},
        "file": "table-00002-of-00004.safetensors",
    }
    assert form == {
        **{"format": 1, "kind": "dlrm", **LAYERS, "num_cross_layers": 1, "cross_rank": 1},
        **{"num_dense": NUM_DENSE, "run": "the run", "step": 5},
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: (d / "model.json").unlink(), "model.json is missing; export the run again"),
        (lambda d: (d / "model.json").write_text("{}"), "model.json: .*kind"),
        (lambda d: (d / "dense.safetensors").unlink(), "is damaged: .*dense.safetensors"),
        (lambda d: cut_off(d / "table-00001-of-00004.safetensors"), "is damaged: .*export"),
        (lambda d: change_form(d, dense_layers=[8, 8]), "is damaged: .*size mismatch"),
        (lambda d: change_form(d, kind="dlrm_dcnv2"), "is damaged: .*crossnet"),
        (lambda d: change_form(d, format=2), "model.json: .*format"),
        (lambda d: change_table(d, num_embeddings=22), "is damaged: .*22"),
        (lambda d: change_table(d, name="other"), "is damaged: .*other"),
        (lambda d: change_table(d, file="../a.safetensors"), "model.json: .*file"),
    ],
)
def test_damaged_folders_are_refused(exported, change, message):
    change(exported)
    with pytest.raises(DataError, match=f"(?s){message}"):
        load_exported(exported)


def change_form(folder: Path, **changes: Any) -> None:
    path = folder / "model.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_table(folder: Path, **changes: Any) -> None:
    tables = json.loads((folder / "model.json").read_text())["tables"]
    change_form(folder, tables=[tables[0] | changes, *tables[1:]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda dense, ids: (dense[:, :4], ids), r"dense is \[12, 4\], and must be \[B, 5\]"),
        (lambda dense, ids: (dense, {"t0": ids["t0"]}), r"lack the features \['t1', 't2', 't3'\]"),
        (
            lambda dense, ids: (dense, ids | {"t1": of_ids(0, 21)}),
            "'t1' has ids from 0 to 21, .*0 to 20",
        ),
        (lambda dense, ids: (dense, ids | {"t1": of_ids(5, -1)}), "'t1' has ids from -1 to 5"),
    ],
)
def test_wrong_tensors_are_refused(exported, change, message):
    example = batch(MIXED)
    features = example.sparse_features.to_dict()
    ids = {name: (of.values(), of.offsets()[:-1]) for name, of in features.items()}
    with pytest.raises(DataError, match=message):
        load_exported(exported).predict(*change(example.dense_features, ids))


def of_ids(*rows: int) -> tuple[Tensor, Tensor]:
    return torch.tensor(rows), torch.zeros(12, dtype=torch.int64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "the model was trained by a release before 0.4"),
        ({"config": {"model": {"_target_": "films.Model"}}}, "_target_ is films.Model"),
    ],
)
def test_weights_of_other_models_are_exported_alone(tmp_path, rank, caplog, changes, message):
    model = {"num_dense": 1, "tables": [], "encoder": None}
    checkpoint = write(tmp_path, rank, **{"model": model, **changes})
    export(read_manifest(checkpoint), tmp_path / "model")
    assert message in caplog.text
    assert not (tmp_path / "model/model.json").exists()
    with pytest.raises(DataError, match="is missing"):
        load_exported(tmp_path / "model")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> TableDataset:
    folder = tmp_path_factory.mktemp("columns")
    COLUMNS.write_parquet(folder / "rows.parquet")
    return TableDataset(
        str(folder / "rows.parquet"),
        SCHEMA,
        batch_size=12,
        val_share=0.4,
        blocks_dir=folder / "blocks",
    )


@pytest.fixture
def of_columns(tmp_path, rank, data) -> tuple[Path, Tensor]:
    """An exported model of a schema, and the probabilities of all rows."""
    model = trained("dlrm", data.tables, num_dense=2)
    encoder = encoder_folder(data)
    assert encoder is not None
    checkpoint = checkpoint_of(
        *(model, data.tables, tmp_path / "run", rank),
        encoder=encoder,
        digest=encoder_digest(Path(encoder)),
    )
    export(read_manifest(checkpoint), tmp_path / "model")
    splits = [("train", i) for i in range(3)] + [("val", i) for i in range(2)]
    batches = [data.batch(split, i, rank=0, world_size=1) for split, i in splits]  # type: ignore[arg-type]
    with torch.no_grad():
        return tmp_path / "model", torch.cat([model(one)[1][1] for one in batches]).sigmoid()


FORMS = {
    "polars": lambda frame: frame,
    "arrow": lambda frame: frame.to_arrow(),
    "columns": lambda frame: frame.to_dict(as_series=False),
    "without_others": lambda frame: frame.drop("clicked", "session"),
    "text": lambda frame: frame.with_columns(pl.col("weekday", "item", "age").cast(pl.String)),
}


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_columns_are_scored_as_they_were_trained(of_columns, monkeypatch, form):
    folder, expected = of_columns
    monkeypatch.setattr(exported_module, "PIECE_ROWS", 25)
    found = load_exported(folder)(FORMS[form](COLUMNS))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert expected.std() > 0.02


def test_no_rows(of_columns):
    assert load_exported(of_columns[0])(COLUMNS.head(0)).shape == (0,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda frame: frame.drop("price"), "no column 'price', which the model was trained with"),
        (lambda frame: frame.drop("seen"), "no column 'seen'"),
        (
            lambda frame: frame.with_columns(weekday=pl.lit(9)),
            "column 'weekday' has 9 in row 0, counted from 0, and must have an integer from 0 to 6",
        ),
        (
            lambda frame: frame.with_columns(age=pl.when(pl.col("session") == "s31").then(np.inf)),
            "column 'age' has inf in row 31",
        ),
        (lambda frame: frame.with_columns(seen=pl.lit("a")), "column 'seen' has String"),
    ],
    ids=["dense", "list", "range", "infinite", "type"],
)
def test_wrong_frames_are_refused(of_columns, monkeypatch, change, message):
    monkeypatch.setattr(exported_module, "PIECE_ROWS", 25)
    with pytest.raises(DataError, match=message):
        load_exported(of_columns[0])(change(COLUMNS))


def test_a_model_without_a_schema_takes_tensors_alone(exported):
    with pytest.raises(DataError, match=r"no encoder; give dense.*predict"):
        load_exported(exported)(COLUMNS)


def test_an_encoder_that_has_moved_or_changed(tmp_path, rank, data):
    model, moved = trained("dlrm", data.tables, num_dense=2), tmp_path / "moved"
    digest = encoder_digest(data.encoder_folder)
    encoder = {"encoder": str(tmp_path / "gone"), "digest": digest}
    manifest = read_manifest(
        checkpoint_of(model, data.tables, tmp_path / "run", rank, **encoder)  # type: ignore[arg-type]
    )
    with pytest.raises(DataError, match=r"gone does not exist; set data\.blocks_dir"):
        export(manifest, tmp_path / "without")
    shutil.copytree(data.encoder_folder, moved / "encoder")
    export(manifest, tmp_path / "with", blocks_dir=str(moved))
    load_exported(tmp_path / "with")(COLUMNS)
    change_a_byte(moved / "encoder/vocabulary-00000.npy")
    with pytest.raises(DataError, match="is not the encoder that"):
        export(manifest, tmp_path / "without", blocks_dir=str(moved))
    assert not (tmp_path / "without").exists()
    export(manifest, tmp_path / "without", blocks_dir="none")
    assert not (tmp_path / "without/encoder").exists()
    load_exported(tmp_path / "without")


def test_a_dataset_without_an_encoder(data, tmp_path):
    """Blocks of release 0.3 have none."""
    assert encoder_folder(data) == str(data.encoder_folder)
    old = TableDataset("rows.parquet", SCHEMA, batch_size=12, blocks_dir=tmp_path)
    assert encoder_folder(old) is None


SCORE = """
import sys

class Refuses:
    def find_spec(self, name, *others):
        if name.partition(".")[0] in ("torchrec", "fbgemm_gpu", "tensordict", "torchmetrics"):
            raise ImportError(f"{name} is not there")

sys.meta_path.insert(0, Refuses())
import polars as pl
from dlrm_sharded import load_exported
print(*load_exported(sys.argv[1])(pl.read_parquet(sys.argv[2])).tolist())
"""


def test_neither_torchrec_nor_fbgemm_is_loaded(of_columns, tmp_path):
    folder, expected = of_columns
    COLUMNS.write_parquet(tmp_path / "rows.parquet")
    arguments = [sys.executable, "-c", SCORE, str(folder), str(tmp_path / "rows.parquet")]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [float(one) for one in done.stdout.split()] == pytest.approx(expected.tolist(), abs=1e-6)
