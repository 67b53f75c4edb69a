"""This room finds what to rent and which sharder to use: it makes candidates, sees where they stop
to scale, and chooses among them.

It measures nothing.

Glossary:
    machine     a kind of hardware: GPUs of one kind in hosts, or the CPUs of this machine
    case        a machine, a number of ranks and a sharder
    outcome     what is predicted of a case: its plan and its step
    candidate   a case with its outcome, or with the reason why it has none
    objective   what candidates are compared by: the time or the price of a sample
    tie         two candidates whose difference the errors of predictions explain
    gain        growth of the throughput relative to that of the ranks; 1 is ideal
"""
