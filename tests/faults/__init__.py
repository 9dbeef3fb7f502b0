"""A fault at every call of whole programs: ``python -m tests.faults --help``.

A scenario is a list of operations. It runs once for every driver call that its operations make, and
in each run the host device refuses that one call; or once for every call for host memory, which
then returns NULL. The operation raises one of gpumem's errors or MemoryError, or succeeds all the
same; after an error everything is as it was before, the operation succeeds when it is tried again,
and at the end nothing is left of the run.

`kinds`      the calls that fail: the driver's, and malloc where gpumem calls it
`stage`      performs operations, one of them with a fault, and compares before and after
`scenarios`  the programs
`search`     runs a scenario for every call and error
"""
