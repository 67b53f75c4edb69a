"""Plan a task, without training and without a GPU: the command `dlrm-plan`.

dlrm-plan task=task.json sharder=torchrec out=plan.json
"""

from __future__ import annotations

import logging

import hydra
from omegaconf import DictConfig

from dlrm_sharded.commands.cli import build_planner
from dlrm_sharded.commands.exit_codes import exit_codes
from dlrm_sharded.commands.hydra_app import CONF_DIR, run_hydra
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.errors import ConfigError
from dlrm_sharded.explain.diagnosis import insight
from dlrm_sharded.explain.text import forecast, sections
from dlrm_sharded.json_files import write_json
from dlrm_sharded.task import GIB, read_task

log = logging.getLogger("dlrm_sharded.plan")


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="plan")
def hydra_main(cfg: DictConfig) -> None:
    with exit_codes():
        if not cfg.out:
            raise ConfigError("out is not set; name the plan.json to write")
        task = read_task(cfg.task)
        planner = build_planner(
            cfg, hardware=None, device=task.topology.compute_device, optimizer=None
        )
        model = planner.cost_model
        if cfg.explain and not isinstance(model, LearnedCostModel):
            raise ConfigError("explain=true explains by a learned cost model: cost_model=learned")
        plan = planner.plan(task)
        write_json(cfg.out, plan.to_json())
        used = plan.bytes_by_rank(task.topology)
        log.info(
            "%s: %d shards of %d tables in %.3f s; %s%.2f to %.2f GiB a rank, of %s; wrote %s",
            plan.sharder,
            len(plan.shards),
            len(task.tables),
            plan.solve_s or 0.0,
            f"{expected}; " if (expected := forecast(plan)) else "",
            min(used) / GIB,
            max(used) / GIB,
            task.topology.rank_memory_text,
            cfg.out,
        )
        if cfg.explain and isinstance(model, LearnedCostModel):
            for section in sections(insight(plan, task, model)):
                log.info("%s", "\n  ".join([section.title, *section.lines]))


def main() -> None:
    run_hydra(hydra_main)


if __name__ == "__main__":
    main()
