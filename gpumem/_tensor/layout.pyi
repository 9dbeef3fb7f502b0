from typing import Any, final

import numpy as np

@final
class ElementType:
    dtype: np.dtype[Any]
