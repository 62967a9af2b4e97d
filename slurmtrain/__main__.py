"""``python -m slurmtrain`` is the ``slurmtrain`` command."""

from slurmtrain.cli import main

if __name__ == "__main__":
    main()
