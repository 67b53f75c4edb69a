"""From files of columns to a model that scores their rows without TorchRec."""

import numpy as np
import polars as pl
import pytest
import torch
import yaml

from dlrm_sharded import load_exported
from tests.e2e.runs import result_of, script, train

NUM_ROWS, VAL_ROWS = 2560, 256
SCHEMA = {
    "label": "clicked",
    "dense": {"price": {"log": True, "standardize": True}},
    "categorical": {
        "user": {"min_count": 1, "dim": 16},
        "item": {"dim": 8},
        "seen": {"table": "item", "longest": 3},
    },
}


@pytest.mark.slow
def test_an_exported_model_scores_as_its_run_was_evaluated(tmp_path):
    """With tables of two widths, one of them for two features, trained on two ranks."""
    rng = np.random.default_rng(0)
    users, items = rng.integers(20, size=NUM_ROWS), rng.integers(30, size=NUM_ROWS)
    rows = pl.DataFrame(
        {
            "clicked": rng.random(NUM_ROWS) < 1 / (1 + np.exp(3 * np.sin(users))),
            "price": rng.exponential(size=NUM_ROWS),
            "user": [f"user {user}" for user in users],
            "item": items,
            "seen": [rng.integers(30, size=rng.integers(5)).tolist() for _ in range(NUM_ROWS)],
        }
    )
    rows.write_parquet(tmp_path / "rows.parquet")
    (tmp_path / "schema.yaml").write_text(yaml.safe_dump(SCHEMA))
    train(
        tmp_path / "run",
        *("data=table", f"data.files={tmp_path / 'rows.parquet'}", "trainer.num_epochs=4"),
        *(f"data.schema={tmp_path / 'schema.yaml'}", "batch_size=128", "sharder=dim"),
        *("model.dense_layers=[16,8]", "model.over_layers=[16,1]", "measure.iterations=2"),
        *("optimizer.embedding_learning_rate=0.1", "optimizer.dense_learning_rate=0.05"),
        f"data.val_share={VAL_ROWS / NUM_ROWS}",
    )
    script("export", tmp_path, "run", "out=model")
    for path in (tmp_path / "rows.parquet", tmp_path / "schema.yaml"):
        path.unlink()
    held_out = rows.tail(VAL_ROWS)
    found = load_exported(tmp_path / "model")(held_out).double()
    labels = torch.tensor(held_out["clicked"].to_numpy())
    wins = (found[labels][:, None] > found[~labels]).double().mean()
    result = result_of(tmp_path / "run")
    assert abs(float(wins) - result["auroc"]) < 1e-4
    assert result["auroc"] > 0.6
    log_loss = torch.nn.functional.binary_cross_entropy(found, labels.double())
    share = labels.double().mean()
    entropy = torch.nn.functional.binary_cross_entropy(share.expand(VAL_ROWS), labels.double())
    assert abs(float(log_loss / entropy) - result["normalized_entropy"]) < 1e-5
