"""Runs a script over the null CUDA: the program of a child process of `gpumem.prediction`.

The folder is started by its path, as a package of another name. It imports nothing of gpumem unless
a run is one with gpumem's allocator, so that the process is that of the script. It imports PyTorch
and what the script begins with, and forks for each run. A run's answer is one JSON object, in a
file named after its allocator.

The one argument is a JSON object, the order: the path of the null CUDA (`library`), the fields of
`NullDevice` (`device`), the `allocators` of the runs, the number of `steps` after which the script
is stopped or null, the line or function `until` which it runs or "", the script with its arguments
(`command`), the `folder` for answers and outputs, the allocator of the run that is `recorded`, the
file of its `recording`, and whether the script's imports are run `ahead` of the forks.
"""
