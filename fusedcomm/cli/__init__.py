"""The command line: ``python -m fusedcomm COMMAND``. A command is a module of this package with
``add_arguments(parser)`` and ``run(args) -> exit code``; main.py lists them.
"""
