from gpumem._core import Arena
from gpumem.device import Device

STAGING_LIMIT: int

def staging_arena(device: Device | str) -> Arena: ...
