"""What graphshard uses of torch that is private, checked against the version that is installed."""
