"""Evaluate a trained model on held-out files, and score their rows: `dlrm-evaluate`.

    dlrm-evaluate runs/mine data.files=held_out.parquet              writes metrics.json
    dlrm-evaluate runs/mine data.files=new.csv scores=scores.parquet  and a score for each row
    dlrm-torchrun --nproc-per-node 8 -m dlrm_sharded.commands.evaluate runs/mine data.files=...

The first word is a checkpoint, or a run's folder, whose best or newest checkpoint is used. Columns
are encoded as in training, by its schema, vocabularies, means and deviations. Files without the
label are only scored. The plan is the checkpoint's if the number of ranks is the same.

    data.files            paths, folders or globs of the rows
    data.blocks_dir       folder of the converted training data, if it has moved
    out                   file of the metrics [metrics.json]; without labels, only if you set it
    scores                Parquet file of the scores, with the schema's key columns, or else with
                          file and row
    batch_size            samples that are scored at once; by default that of training
    max_malformed_share   share of a file's rows that may be malformed; they are left out [0.001]

Until the command is done, it keeps its work in a folder beside the scores: `<scores>.partial`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dlrm_sharded.checkpoint.good import best_checkpoint
from dlrm_sharded.checkpoint.manifest import Manifest
from dlrm_sharded.checkpoint.trained_encoder import trained_encoder
from dlrm_sharded.commands.exit_codes import exit_codes
from dlrm_sharded.commands.hydra_app import quiet_libraries
from dlrm_sharded.commands.train import job_settings
from dlrm_sharded.commands.words import read_words
from dlrm_sharded.datasets.conversion import discard
from dlrm_sharded.datasets.encoder import ColumnEncoder
from dlrm_sharded.datasets.held_out import HeldOutDataset, has_label
from dlrm_sharded.datasets.source_files import find_files
from dlrm_sharded.files.errors import ConfigError, check_count, check_path
from dlrm_sharded.files.json_files import check_file_to_write, write_json
from dlrm_sharded.files.line_file import holder, turn
from dlrm_sharded.files.remote_files import location
from dlrm_sharded.files.text_table import quantity
from dlrm_sharded.job.evaluation import Scoring, metrics_json
from dlrm_sharded.job.settings import JobSettings
from dlrm_sharded.ranks.agreement import all_or_none, on_rank_zero, patiently_on_rank_zero
from dlrm_sharded.ranks.distributed import Rank, process_group

log = logging.getLogger(__name__)

KEYS = ("data.files", "data.blocks_dir", "out", "scores", "batch_size", "max_malformed_share")


def main() -> None:
    quiet_libraries()
    with exit_codes():
        names, keys = read_words(__doc__, KEYS, names="a run's folder or a checkpoint")
        if len(names) > 1 or "data.files" not in keys:
            raise ConfigError("give one run or checkpoint, and data.files, the rows to evaluate")
        with process_group() as rank, contextlib.ExitStack() as stack:
            logging.basicConfig(format="%(message)s", level=logging.ERROR, force=True)
            logging.getLogger("torch").setLevel(logging.ERROR)
            if rank.is_zero:
                for package in ("checkpoint", "datasets", "job"):
                    logging.getLogger(f"dlrm_sharded.{package}").setLevel(logging.INFO)
            _evaluate(names[0], keys, rank, stack)


def _evaluate(name: str, keys: dict[str, Any], rank: Rank, stack: contextlib.ExitStack) -> None:
    scores, out = keys.get("scores"), keys.get("out", "metrics.json")
    with all_or_none():
        for key, path in (("out", out), ("scores", scores)):
            if path is not None:
                check_file_to_write(key, path, may_be_stream=False)
        written = [Path(path).resolve() for path in (out, scores) if path is not None]
        read = [path.resolve() for path in find_files("data.files", keys["data.files"])]
        if len({*written, *read}) < len(written) + len(read):
            raise ConfigError(
                "out, scores and data.files name the same file; give each a file of its own"
            )
        if rank.is_zero:
            lock = Path(f"{scores or out}.lock")
            with contextlib.suppress(OSError):  # some shared disks have no locks
                if not stack.enter_context(turn(lock, doing="writes the file", limit_s=0.0)):
                    found = f"{holder(lock)} writes {scores or out}"
                    raise ConfigError(f"{found}; wait for its end, or name another")
                stack.callback(lock.unlink, missing_ok=True)
    manifest = on_rank_zero(lambda: best_checkpoint(location("the run", name)))
    folder = Path(f"{scores or out}.partial")
    with all_or_none():
        settings, data, with_label = _settings(manifest, keys, folder, rank)
    made_of = {"checkpoint": str(manifest.folder), "run": manifest.state.run}
    patiently_on_rank_zero(lambda: data.convert(made_of))
    scoring = Scoring(settings, rank, manifest, data, folder)
    evaluation = scoring.run()
    metrics = metrics_json(scoring, evaluation, with_label=with_label)

    def finish() -> None:
        files = [scores] if scores else []
        if scores:
            scoring.write_scores(Path(scores))
        if with_label or "out" in keys:  # scoring alone does not replace the metrics of other rows
            Path(out).parent.mkdir(parents=True, exist_ok=True)
            write_json(out, metrics)
            files.append(out)
        discard(folder)
        _print(metrics)
        print(f"wrote {' and '.join(files)}")

    patiently_on_rank_zero(finish)


def _settings(
    manifest: Manifest, keys: dict[str, Any], folder: Path, rank: Rank
) -> tuple[JobSettings, HeldOutDataset, bool]:
    """Return the training run's settings with the held-out data, and whether that has labels."""
    config = OmegaConf.create(dict(manifest.state.config))
    batch_size = keys.get("batch_size", config.batch_size)
    check_count("batch_size", batch_size, least=1)
    # the next size that the ranks share equally
    config.batch_size = -(-batch_size // rank.world_size) * rank.world_size
    encoder = _encoder(manifest, keys.get("data.blocks_dir"))
    dims = {
        name: manifest.tensors[f"tables.{name}.weight"].shape[1] for name in encoder.schema.tables()
    }
    key = encoder.schema.key if keys.get("scores") else ()
    with_label = has_label(encoder.schema, find_files("data.files", keys["data.files"]), key=key)
    if not with_label and not keys.get("scores"):
        raise ConfigError(
            f"the files have no column {encoder.schema.label!r}, the label, so nothing can be "
            "evaluated; give scores=FILE.parquet to score their rows"
        )
    data = HeldOutDataset(
        keys["data.files"],
        encoder,
        dims,
        folder,
        batch_size=config.batch_size,
        with_label=with_label,
        max_malformed_share=keys.get("max_malformed_share", 0.001),
    )
    # replaces the training data
    config.data = {"bounds": "ignore", "_target_": "types.SimpleNamespace"}
    settings = job_settings(config, rank)
    return dataclasses.replace(settings, dataset=data), data, with_label


def _encoder(manifest: Manifest, blocks_dir: str | None) -> ColumnEncoder:
    if blocks_dir is not None:
        check_path("data.blocks_dir", blocks_dir)
    folder = trained_encoder(manifest, blocks_dir)
    if folder is None:
        raise ConfigError(
            f"{manifest.folder} was trained on data without a schema, or by a release before 0.4; "
            "dlrm-evaluate takes runs of data=table and of Criteo's files"
        )
    return ColumnEncoder.load(folder)


def _print(metrics: dict[str, Any]) -> None:
    shown = {
        key: metrics.get(key) for key in ("loss", "auroc", "normalized_entropy", "calibration")
    }
    text = ", ".join(f"{key} {value:.4f}" for key, value in shown.items() if value is not None)
    if malformed := metrics["num_malformed"]:
        print(f"malformed rows that are left out: {malformed:,}")
    print(f"{quantity(metrics['num_rows'], 'row')}{': ' if text else ''}{text}")
    unseen = metrics["unseen_share"]
    if unseen and max(unseen.values()) > 0:
        shares = sorted(unseen.items(), key=lambda item: -item[1])
        print("unseen or rare ids: " + ", ".join(f"{key} {share:.1%}" for key, share in shares[:5]))


if __name__ == "__main__":
    main()
