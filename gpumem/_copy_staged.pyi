SLOT_BYTES: int
SLOTS_IN_FLIGHT: int

def set_pipeline(nbytes: int, flight: int) -> None: ...
