"""Finding a policy: what to try, what it would cost, and what to make of that."""
