"""Identifies hardware, and finds cost models and policies for it.

Stages are timed in `measuring`.

A *fingerprint* says what the hardware is: read in milliseconds, equal on equal machines. A *probe*
says how fast it is: measured in about a second. *Hardware* is a name with both. Two machines are
*compared* by their fingerprints and, within bounds, by their probes.
"""
