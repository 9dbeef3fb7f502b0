from gpumem._arena.arena import Arena
from gpumem.device import Device

SLOT_BYTES: int
SLOTS_IN_FLIGHT: int

def set_pipeline(nbytes: int, flight: int) -> None: ...

STAGING_LIMIT: int

def staging_arena(device: Device | str) -> Arena: ...
def set_threads(count: int) -> None: ...
