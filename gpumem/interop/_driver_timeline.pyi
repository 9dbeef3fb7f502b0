from typing import final

from gpumem._handle import Handle
from gpumem.device import Device
from gpumem.interop._timeline import Timeline

@final
class DriverTimeline(Timeline):
    def export(self) -> Handle: ...

def import_fd(device: Device, fd: int) -> DriverTimeline: ...
def import_windows(device: Device, kind: int, handle: int | str) -> DriverTimeline: ...
