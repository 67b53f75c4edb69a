"""Identifies hardware, and finds files that were fitted to it.

Cost models are chosen in `calibration`.

A *fingerprint* says what the hardware is: read in milliseconds, equal on equal machines. A *probe*
says how fast it is: measured in about a second. *Hardware* is a name with both. Two machines are
*compared* by their fingerprints and, within bounds, by their probes.
"""
