from typing import Any

import numpy as np

def dtype_from(given: object) -> np.dtype[Any]: ...
