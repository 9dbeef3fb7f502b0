"""The first use of a device, or of the driver, from several threads at once."""

from __future__ import annotations

from helpers.child import run_quietly

import gpumem
from gpumem import device
from gpumem._native.driver import host as _host


def test_concurrent_first_use_opens_one_device(monkeypatch):
    monkeypatch.setattr(device, "_opened", {})
    original, faster = _host.open_device, []

    def slow(ordinal):
        if not faster:
            faster.append(None)
            faster[0] = gpumem.Device("host")._open()
        return original(ordinal)

    monkeypatch.setattr(_host, "open_device", slow)
    assert gpumem.Device("host")._open() is faster[0]


def test_concurrent_driver_load_gives_one_answer():
    run_quietly("""
        import sys, threading, time, types

        asked, asks_too = threading.Event(), threading.Event()

        class Slow(types.ModuleType):
            def cuGetProcAddress(self, name, version, flags):
                asked.set()
                asks_too.wait()
                time.sleep(0)  # the main thread's turn
                return 1, 0

        bindings = types.ModuleType("cuda.bindings")
        bindings.driver = Slow("cuda.bindings.driver")
        sys.modules.update({"cuda": types.ModuleType("cuda"), "cuda.bindings": bindings,
                            "cuda.bindings.driver": bindings.driver})
        from gpumem._testing.driver import load_cuda_driver

        first = threading.Thread(target=load_cuda_driver)
        first.start()
        asked.wait()
        asks_too.set()
        reason = load_cuda_driver()
        first.join()
        assert reason == load_cuda_driver(), reason
    """)
