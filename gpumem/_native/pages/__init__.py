"""Physical pages of 2 to 32 MiB that move under reserved addresses.

``types`` is the model, ``space`` its changes and checks, ``plan`` decides which page is made or
moves where, ``execute`` makes the driver calls of a plan.
"""
