"""A cluster of any size is simulated on one device: each rank's lookups are measured one after
another, and the steps of all ranks become a timeline.

Recorded steps of real runs are in `tracing`.

Glossary:
    rank's measurement  times of the lookups and updates of one rank's shards, run by themselves
    origin              how a rank's computation is known, one of `ranks.ORIGINS`
    scaled              predicted, times what measured ranks took relative to their prediction
    priced              predicted by the prior of a GPU that is not at hand
    folded              a shard that has fewer rows than in the plan, so that it fits this machine;
                        its ids are taken modulo its rows
    store               the file of the measurements so far, from which a simulation goes on
"""
