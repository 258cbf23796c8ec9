"""Runs the command line: `python -m mmspec`."""

from mmspec.cli import main

if __name__ == "__main__":
    main()
