"""A training step is a timeline: its parts, their overlap, the waiting of ranks, and its
prediction.

How long each part takes comes from `cost`, `dense` and `measuring`.

Glossary:
    part        what time goes to, one of `PARTS`; the parts of a rank's step sum to the step
    operation   work that every rank does once in a step, for one part, on one stream
    stream      operations of one stream run one after the other: compute, exchange, reader
    collective  operation that begins when the last rank has arrived
    arrival     when a rank is ready to begin an operation
    waiting     time from a rank's arrival until the last rank's; that rank is the cause
    exposed     time of an exchange in which the rank computes nothing
    timeline    when every operation of some steps began and ended on every rank
    breakdown   parts of the step on every rank, and the waits, with their causes
"""
