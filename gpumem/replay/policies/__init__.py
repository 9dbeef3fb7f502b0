"""What each way to serve a trace would reserve: models to compare an arena with."""
