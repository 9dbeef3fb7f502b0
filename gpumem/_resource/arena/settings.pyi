from gpumem.device import MemoryKind

HOST_KINDS: tuple[MemoryKind, ...]
HINTS: dict[str, bool | str]
