"""Check or fetch the data set: ``python -m d2lpar --download``."""

from .data import main

if __name__ == "__main__":
    main()
