"""What every layer shares: locks, atomics, process state, deferred work. Imports nothing above."""
