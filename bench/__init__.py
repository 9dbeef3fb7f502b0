"""Measurements: ratios from one interleaved run, never figures asserted in a test.

``python -m bench`` runs everything this machine can run; ``--json`` prints one object.
Each module answers one question and says it in its first line; README.md has them in a table.
"""
