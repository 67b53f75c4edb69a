"""Errors, and files: JSON that is written whole or not at all, lines of JSON, caches, provenance.

It knows no other room.

It knows no other room.
"""
