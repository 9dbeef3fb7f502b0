"""Random programs over arenas, budgets, sessions and timelines: ``python -m tests.model --help``.

Hypothesis draws programs of the rules below and runs each against gpumem and against a model in
plain Python. The program has one thread that decides, so the model knows at every moment which
queued work must be done, which may be, and which cannot be. Gates and timelines hold streams back,
so that work is really unfinished. What differs from the model is shown as the shortest program.

`work`      streams: what is queued, what it waits for, how far it must be and can be
`books`     blocks, arenas and budgets: what is handed out, what is counted
`world`     the objects of one program, what holds after each rule, and its end
`memory`    rules of arenas and blocks; `arenas` of an arena as a whole
`budgets`   rules of limits, reservations and pressure
`timelines` rules of gates and timelines
`sessions`  rules of bindings and runs
`captures`  rules of graphs and their pools
`diary`     what a program did, for failures that a second run does not show

Not looked at: memory of sources, imported memory, `DriverPool`, peers, several threads at once.

`test_against_oracle` follows one arena more closely: which block it chooses, and how it grows.
"""
