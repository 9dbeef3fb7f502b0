"""CUDA graphs of what is queued on a stream, captured as a user's own code does it."""

from __future__ import annotations

import ctypes

import gpumem

from .driver import HostDriver

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2  # modes of a capture


class Graph:
    """What was captured on a stream in a ``with`` block."""

    def __init__(self, driver: HostDriver, stream: gpumem.Stream, mode: int = GLOBAL) -> None:
        self.driver, self.stream, self.mode = driver, stream, mode
        self.handle = self.executable = 0

    def __enter__(self):
        self.driver.call("cuStreamBeginCapture", self.stream.ptr, self.mode)
        return self

    def __exit__(self, *exception: object) -> None:
        graph = ctypes.c_uint64()
        self.driver.call("cuStreamEndCapture", self.stream.ptr, ctypes.byref(graph))
        self.handle = graph.value

    def instantiate(self) -> Graph:
        made = ctypes.c_uint64()
        self.driver.call("cuGraphInstantiateWithFlags", ctypes.byref(made), self.handle, 0)
        self.executable = made.value
        return self

    def launch(self, stream: gpumem.Stream | None = None) -> None:
        self.driver.call("cuGraphLaunch", self.executable, (stream or self.stream).ptr)

    def destroy(self) -> None:
        self.driver.call("cuGraphDestroy", self.handle)

    def destroy_instance(self) -> None:
        self.driver.call("cuGraphExecDestroy", self.executable)
