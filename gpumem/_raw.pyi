from typing import final

@final
class RawBooks: ...
