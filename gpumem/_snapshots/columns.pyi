from typing import Any

import numpy as np

STATES: tuple[str, ...]
BLOCK: np.dtype[np.void]
REGION: np.dtype[np.void]
PAGE: np.dtype[np.void]
REGION_KINDS: tuple[str, ...]

def all_of_them() -> list[dict[str, Any]]: ...
def describe(resource: object) -> dict[str, Any]: ...
def parts_of(resource: object) -> list[object]: ...
def key_of(resource: object) -> int: ...
