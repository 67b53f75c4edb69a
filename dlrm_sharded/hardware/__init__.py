"""Says what a machine is, by its fingerprint, its probe and the data sheets of GPUs, and finds
the artifacts that were fitted on one.

The stages of a plan are measured in `measuring`.

A *fingerprint* says what the hardware is: read in milliseconds, equal on equal machines. A *probe*
says how fast it is: measured in about a second. *Hardware* is a name with both. Two of them are
*compared* by their fingerprints and, within bounds, by their probes.
"""
