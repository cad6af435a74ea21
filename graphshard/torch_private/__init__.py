"""The private API of torch that graphshard uses, checked against the installed version."""
