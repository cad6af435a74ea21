"""Find the fastest policy that fits in memory: candidates, their simulation, and the search."""
