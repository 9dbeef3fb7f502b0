"""Physical pages of 2 to 32 MiB that move under reserved addresses."""
