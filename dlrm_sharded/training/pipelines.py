"""The pipelines that a training run can use; `pipeline.py` has their classes.

TorchRec has others. They train on vectors without the latest update, or are experimental.
"""

from __future__ import annotations

PIPELINES = {"base": 2, "sparse_dist": 3}
"""The largest number of batches that a device holds at a time, by pipeline. All batches but the
last one have been redistributed."""
