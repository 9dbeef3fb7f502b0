"""Runs a program over the null CUDA: the program of a child process of `gpumem.prediction`.

The folder is started by its path, as a package of another name. It imports nothing of gpumem unless
a run is one with gpumem's allocator, so that the process is that of the program. It imports PyTorch
and what the program begins with, and forks for each run. A run's answer is one JSON object, in a
file named after its allocator, and after the value of the name that varies.

The one argument is a JSON object, the order: the path of the null CUDA (`library`), the fields of
`NullDevice` (`device`), the `allocators` of the runs, the number of `steps` after which the program
is stopped or null, the line or function `until` which it runs or "", the script with its arguments
(`command`), the `folder` for answers and outputs, the allocator of the run that is `recorded`, the
file of its `recording`, and whether the program's imports are run `ahead` of the forks. A program
that is a function is the pickle `call`, a file, which may need modules of `path`; `command` is its
file. In a search, the `name` has one of the `values`, the arguments of a range; else they are null.
"""
