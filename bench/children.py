"""Processes that measure on request: PyTorch lets each choose its allocator once.

They live as long as their measurements, so that rounds can alternate between allocators without
starting PyTorch for each.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from socket import socket
from types import TracebackType
from typing import Any, Self

from bench.workloads import CONFIGURATIONS

Answer = dict[str, Any]

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 240.0  # seconds
# NVLink multicast is a resource of the whole host, which others may share.
SHARED_HOST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # cuBLAS is deterministic only with this


class Child:
    """One process; once it failed to answer, every further answer says how."""

    def __init__(
        self,
        configuration: str,
        device: str,
        limit: int = 0,
        more: Mapping[str, str] | None = None,
    ) -> None:
        self.configuration = configuration
        command = [sys.executable, "-m", "bench.workloads.child", configuration]
        self._process = subprocess.Popen(
            [*command, "--device", device, "--limit", str(limit)],
            cwd=ROOT,
            env=environment(configuration) | dict(more or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._failure: Answer | None = None
        self._read = b""

    def send(self, request: Mapping[str, Any]) -> None:
        if self._failure is None:
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                self._fail(self._ended())

    def receive(self, timeout: float = TIMEOUT) -> Answer:
        """Wait for the answer to the last request; {"error": ...} if there is none."""
        line = b"" if self._failure else self._line(time.monotonic() + timeout)
        return self._failure or json.loads(line)

    def ask(self, request: Mapping[str, Any], timeout: float = TIMEOUT) -> Answer:
        self.send(request)
        return self.receive(timeout)

    def _line(self, deadline: float) -> bytes:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._read:
                if not selector.select(deadline - time.monotonic()):
                    self._process.kill()
                    self._fail("no answer in time")
                    return b""
                piece = os.read(self._process.stdout.fileno(), 1 << 16)
                if not piece:
                    self._fail(self._ended())
                    return b""
                self._read += piece
        line, _, self._read = self._read.partition(b"\n")
        return line

    def _ended(self) -> str:
        return f"the process ended with {self._process.wait()}"

    def _fail(self, reason: str) -> None:
        self._failure = {"error": reason}

    def close(self) -> None:
        """End the process: at its own pace if it answers, else at once."""
        try:
            self._process.communicate(timeout=30 if self._failure is None else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()


class Ranks:
    """Processes of one process group, one for each device, which are asked together."""

    def __init__(self, configuration: str, devices: Sequence[str]) -> None:
        self.configuration = configuration
        self._children = [
            Child(configuration, device, more=more)
            for device, more in zip(devices, ranks(len(devices)), strict=True)
        ]

    def ask(self, request: Mapping[str, Any]) -> list[Answer]:
        for child in self._children:
            child.send(request)
        return [child.receive() for child in self._children]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        # All at once: a rank that leaves the group waits for the others.
        with ThreadPoolExecutor(len(self._children)) as pool:
            list(pool.map(Child.close, self._children))


def ranks(count: int) -> list[dict[str, str]]:
    """Return the environment of each process of a group, as torchrun sets it."""
    with socket() as free:  # its port is not given to another socket for a while
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [group | SHARED_HOST | {"RANK": str(rank)} for rank in range(count)]


def launch(command: Sequence[str], count: int) -> str:
    """Run a command as `count` ranks; returns the output of the first one.

    Raises
    ------
    subprocess.CalledProcessError
        A rank failed.
    """
    processes = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | more,
            stdout=subprocess.PIPE if more["RANK"] == "0" else subprocess.DEVNULL,
            text=True,
        )
        for more in ranks(count)
    ]
    try:
        printed = [process.communicate(timeout=TIMEOUT)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()  # where a rank failed, the others wait for it
    for process in processes:
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, list(command))
    return printed[0]


def environment(configuration: str) -> dict[str, str]:
    """Return the environment of a configuration's process; of PyTorch's settings only its own."""
    kept = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    return kept | ENVIRONMENT | CONFIGURATIONS[configuration]


def ask_all(children: Iterable[Child], request: Mapping[str, Any]) -> dict[str, Answer]:
    """Ask all at once, for answers in which time does not count."""
    asked = list(children)
    for child in asked:
        child.send(request)
    return {child.configuration: child.receive() for child in asked}


def ask_in_turn(children: Iterable[Child], request: Mapping[str, Any]) -> dict[str, Answer]:
    """Ask one after another, so that each has the machine to itself."""
    return {child.configuration: child.ask(request) for child in children}
