"""The debug heap of an arena: ``heap`` (states of blocks, quarantine), ``guards`` (findings)."""
