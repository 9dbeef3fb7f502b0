"""Questions to a driver that its documentation leaves open, by topic."""
