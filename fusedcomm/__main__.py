"""``python -m fusedcomm``."""

from fusedcomm.cli.main import main

if __name__ == "__main__":  # ranks are spawned processes, which import this module again
    raise SystemExit(main())
