"""`python -m memplan`."""

from memplan.cli import main

if __name__ == "__main__":
    main()
