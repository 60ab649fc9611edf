"""The program `tfopt`, also as `python -m tfopt`: Ctrl-C ends it without a traceback while it begins and ends, too."""

import signal
import sys


def main() -> int:
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # and not ignored, as in the background of a shell
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from tfopt.cli import main as command  # takes a part of a second

    signal.signal(signal.SIGINT, before)
    try:
        return command()
    finally:
        if before is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # the interpreter ends TensorFlow's threads


if __name__ == "__main__":
    sys.exit(main())
