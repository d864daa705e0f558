"""How a program that a test starts hears Ctrl-C, wherever the suite was started."""

#: In front of a program: what a shell runs in the background, and what that starts, ignores Ctrl-C.
HEARS_CTRL_C = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
