"""Lines of the script, and PyTorch's operators, that a call into CUDA comes from."""

from __future__ import annotations

import ctypes
import os
import re
from types import FrameType, TracebackType
from typing import Any

_FOLDER = os.path.dirname(__file__) + os.sep
_OTHERS = re.compile(f"site-packages|^{re.escape(_FOLDER)}")
_OPERATOR = re.compile(rb"_ZN(?:2at4_ops|6vision3ops)(\d+)")


class Callers:
    """Finds the line of the script, and the operator, that a call into CUDA comes from."""

    def __init__(self, script: str) -> None:
        self.script = script
        # A function that was typed, rather than written to a file, has a name such as "<stdin>".
        self.folder = (os.path.dirname(script) or script) + os.sep
        self.names: dict[int, str] = {}  # of operators, by return address
        self.dladdr = ctypes.CDLL(None).dladdr

    def is_own(self, file: str) -> bool:
        """Whether a file is the script or lies beside it."""
        if file == self.script:
            return True
        return file.startswith(self.folder) and not _OTHERS.search(file)

    def line(self, frame: FrameType | None) -> str:
        """Return the innermost line of the script: "train.py:12"."""
        inner = ""
        while frame is not None:
            file = frame.f_code.co_filename
            if self.is_own(file):
                return f"{file.removeprefix(self.folder)}:{frame.f_lineno}"
            if not inner and not file.startswith(_FOLDER):
                inner = f"{file.rpartition('site-packages/')[2]}:{frame.f_lineno}"
            frame = frame.f_back
        return inner or "in backward"

    def line_of_error(self, trace: TracebackType | None) -> str:
        """Return the innermost line of the script in a traceback."""
        found = ""
        while trace is not None:
            file = trace.tb_frame.f_code.co_filename
            if self.is_own(file):
                found = f"{file.removeprefix(self.folder)}:{trace.tb_lineno}"
            trace = trace.tb_next
        return found

    def library(self, frames: Any, count: int) -> str:
        """Return the file of the library that called the null CUDA."""
        files = []
        for i in range(count):
            symbol = (ctypes.c_char_p * 4)()
            if self.dladdr(ctypes.c_void_p(frames[i]), symbol):
                files.append(os.fsdecode(symbol[0] or b""))
        return next((each for each in files if each != files[0]), "a library")

    def operators(self, frames: Any, count: int) -> list[str]:
        """Return PyTorch's operators that run, innermost first, each once."""
        found = dict.fromkeys(self.operator(frames[i]) for i in range(count))
        return [name for name in found if name]

    def operator(self, address: int) -> str:
        """Return the operator that a return address lies in, by its C++ symbol; or ""."""
        name = self.names.get(address)
        if name is None:
            symbol = (ctypes.c_void_p * 4)()  # file, its base, name, address
            self.dladdr(ctypes.c_void_p(address), symbol)
            mangled = ctypes.string_at(symbol[2]) if symbol[2] else b""
            match = _OPERATOR.match(mangled)
            end = match.end() if match else 0
            name = mangled[end : end + int(match[1])].decode() if match else ""
            self.names[address] = name
        return name
