"""The step of a cluster that is not there is predicted: its ranks are measured one after another on
one device, or priced, and their steps become a timeline; candidates of what to rent and which
sharder to use are compared by it.

Recorded steps of real runs are in `tracing`.

Glossary:
    rank's measurement  times of the lookups and updates of one rank's shards, run by themselves
    origin              how a rank's computation is known, one of `ranks.ORIGINS`
    scaled              predicted, times what measured ranks took relative to their prediction
    priced              predicted by the prior of a GPU that is not at hand
    folded              a shard that has fewer rows than in the plan, so that it fits this machine;
                        its ids are taken modulo its rows
    store               the file of the measurements so far, from which a simulation goes on
    machine             a kind of hardware: GPUs of one kind in hosts, or the CPUs of this machine
    case                a machine, a number of ranks and a sharder, with their task
    outcome             what is predicted of a case: its plan and its step
    candidate           a case with its outcome, or with the reason why it has none
    objective           what candidates are compared by: the time or the price of a sample
    tie                 two candidates whose difference the errors of predictions explain
    gain                growth of the throughput relative to that of the ranks; 1 is ideal
"""
