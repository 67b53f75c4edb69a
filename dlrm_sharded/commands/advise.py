"""Advise on what to rent and which sharder to use: the command `dlrm-advise`.

dlrm-advise task=task.json hardware=[h100,h200,a100] ranks=[4,8,16,32] prices.h100=2.5 ...
dlrm-advise data=t510 hardware=h100 ranks=16
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import hydra
from omegaconf import DictConfig

from dlrm_sharded.commands.advise_config import question_of, same_in_run, stated_task
from dlrm_sharded.commands.exit_codes import exit_codes
from dlrm_sharded.commands.hydra_app import run_hydra
from dlrm_sharded.commands.sharders import start_budget
from dlrm_sharded.commands.yamls import CONF_DIR
from dlrm_sharded.files.errors import check_count, check_number
from dlrm_sharded.files.json_files import folder_to_write
from dlrm_sharded.ranks.process import num_cores
from dlrm_sharded.simulation.advice_text import advice_lines, choice_text, overrides_text
from dlrm_sharded.simulation.candidates import no_outcome
from dlrm_sharded.simulation.choice import choose
from dlrm_sharded.simulation.files import write_advice

MOST_WORKERS = 8

log = logging.getLogger("dlrm_sharded.advise")


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="advise")
def hydra_main(cfg: DictConfig) -> None:
    with exit_codes():
        _check(cfg)
        of_file = stated_task(cfg)
        if of_file is not None and of_file.note is not None:
            log.info("%s", of_file.note)
        num_workers = cfg.workers or min(num_cores(), MOST_WORKERS)
        with tempfile.TemporaryDirectory() as folder:
            question, samples = question_of(cfg, of_file, folder=Path(folder))
            budget_s = start_budget(cfg)
            if budget_s is not None and any(not case.machine.is_gpu for case in question.cases):
                log.info(
                    "this machine is measured for at most %.0f s for each number of threads, if it "
                    "has no prices of its own (calibrate=never leaves that out)",
                    budget_s,
                )
            candidates = question.candidates(seconds=cfg.seconds, num_workers=num_workers)
        if not any(candidate.is_feasible for candidate in candidates):
            raise no_outcome(candidates)
        choice = choose(candidates, least_gain=cfg.least_gain)
        overrides = overrides_text(choice.best, same_in_run(of_file))
        lines = [*advice_lines(choice, samples=samples), f"overrides: {overrides}"]
        if cfg.out is not None:
            texts = {"advice": choice_text(choice, samples=samples), "overrides": overrides}
            write_advice(Path(cfg.out), choice, samples=samples, texts=texts)
            lines.append(f"wrote advice.json, advice.csv, task.json and plan.json to {cfg.out}")
        log.info("%s", "\n".join(lines))


def _check(cfg: DictConfig) -> None:
    check_count("num_dense", cfg.num_dense, least=0)
    check_count("seed", cfg.seed, least=0)
    check_number("least_gain", cfg.least_gain, most=1.0)
    check_number("seconds", cfg.seconds, above=True, most=1e6)
    if cfg.workers is not None:
        check_count("workers", cfg.workers, least=1, most=1024)
    if cfg.samples is not None:
        check_number("samples", cfg.samples, above=True, most=1e18)
    if cfg.out is not None:
        folder_to_write("out", cfg.out)


def main() -> None:
    run_hydra(hydra_main)


if __name__ == "__main__":
    main()
