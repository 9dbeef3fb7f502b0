"""The host device's own functions, through ctypes: size, time, counters, faults, end."""

from __future__ import annotations

import ctypes

U64 = ctypes.c_uint64
SIGNATURES = {
    "hostdev_set_device_count": (ctypes.c_int, [ctypes.c_int]),
    "hostdev_set_capacity": (ctypes.c_int, [ctypes.c_int, ctypes.c_size_t]),
    "hostdev_capacity": (ctypes.c_size_t, [ctypes.c_int]),
    "hostdev_used": (ctypes.c_size_t, [ctypes.c_int]),
    "hostdev_set_lag": (None, [U64]),
    "hostdev_use_virtual_clock": (ctypes.c_int, [ctypes.c_int]),
    "hostdev_advance_clock": (None, [U64]),
    "hostdev_now": (U64, []),
    "hostdev_call_count": (U64, [ctypes.c_char_p]),
    "hostdev_total_calls": (U64, []),
    "hostdev_reset_counts": (None, []),
    "hostdev_live": (None, [ctypes.c_void_p]),
    "hostdev_shutdown": (None, []),
    "hostdev_fail": (ctypes.c_int, [ctypes.c_char_p, U64, U64, ctypes.c_int]),
    "hostdev_fail_here": (ctypes.c_int, [ctypes.c_char_p, U64, U64, ctypes.c_int]),
    "hostdev_delay_record": (ctypes.c_int, [U64, U64]),
    "hostdev_lose_device": (ctypes.c_int, [ctypes.c_int, ctypes.c_int]),
    "hostdev_separate": (ctypes.c_int, [ctypes.c_int, ctypes.c_int, ctypes.c_int]),
    "hostdev_clear_faults": (None, []),
    "hostdev_last_fault": (ctypes.c_char_p, []),
    "hostdev_use_h200_costs": (None, [ctypes.c_int]),
    "hostdev_find_misuse": (None, [ctypes.c_int]),
    "hostdev_misuse_count": (U64, [ctypes.c_int]),
    "hostdev_misuse_report": (ctypes.c_char_p, []),
}


class Live(ctypes.Structure):
    _fields_ = [
        (name, U64)
        for name in (
            "streams",
            "events",
            "workers",
            "allocations",
            "handles",
            "mappings",
            "reservations",
            "pools",
            "imports",
            "graphs",
        )
    ]


class Control:
    """`host.set_lag(n)` calls `hostdev_set_lag(n)`."""

    def __init__(self, driver) -> None:
        self._library = driver.library

    def __getattr__(self, name: str):
        function = getattr(self._library, f"hostdev_{name}")
        function.restype, function.argtypes = SIGNATURES[f"hostdev_{name}"]
        return function

    def count(self, name: str) -> int:
        return self.call_count(name.encode())

    def alive(self) -> Live:
        live = Live()
        self.live(ctypes.byref(live))
        return live
