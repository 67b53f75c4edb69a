"""Saves a run, and loads it under any plan.

When a checkpoint is due is decided in `training`.

Glossary:
    logical tensor  a whole table, weight or optimizer state under a name that no plan changes; each
                    rank holds pieces of it
    piece           a rectangle of a logical tensor, in the memory of one rank
    part            a safetensors file with pieces of one rank
    manifest        the JSON file that says what the parts contain; a folder with a manifest is a
                    checkpoint
    progress        the trainer's own state: step, losses that are not logged yet, evaluation

torch.distributed.checkpoint is not used, because its storage pickles metadata, and its planners do
not support rectangles of a tensor that are views of parameters.
"""
