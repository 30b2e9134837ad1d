"""`python -m cbgen` is the `cbgen` command."""

from cbgen.cli import main

if __name__ == "__main__":
    main()
