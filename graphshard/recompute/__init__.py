"""Choose the values that backward computes again instead of saving them."""
