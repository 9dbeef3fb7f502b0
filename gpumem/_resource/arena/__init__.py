"""What `gpumem.Arena` is made of above C: settings, sources, reports, graph pools, debug heap."""
