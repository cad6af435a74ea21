"""`python -m graphshard`."""

from graphshard.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
