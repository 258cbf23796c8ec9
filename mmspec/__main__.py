"""`python -m mmspec` is the command line."""

from mmspec.cli import main

if __name__ == "__main__":
    main()
