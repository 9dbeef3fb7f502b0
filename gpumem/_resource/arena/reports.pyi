FRAMEWORKS: tuple[str, ...]
tag_texts: list[str]
