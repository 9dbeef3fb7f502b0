"""Tests that depend on timing, many times under load: ``python -m tests.repeat --help``.

The quarter of the test files with the most tests that depend on threads, child processes, signals,
time or queued work runs again and again, each time in a process of its own, in a random order,
while other processes keep the processors busy. A test that fails once in hundreds of runs is seen
here.

`choice`  which files these are
`runs`    runs files beside each other, and counts what fails
"""
