"""Simulates a cluster on one device: every rank's lookups run one after the other.

Glossary:
    rank's measurement  times of the lookups and updates of one rank's shards, run by themselves
    origin              how a rank's computation is known, one of `ranks.ORIGINS`
    scaled              predicted, times what measured ranks took relative to their prediction
    priced              predicted by the prior of a GPU that is not at hand
    folded              a shard that has fewer rows than in the plan, so that it fits this machine;
                        its ids are taken modulo its rows
    store               the file of the measurements so far, from which a simulation goes on
"""
