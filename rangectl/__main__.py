"""Where the `rangectl` process starts, also as `python -m rangectl`; does nothing but that."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line. Until there is something to clean up, Ctrl-C just ends the process."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from rangectl import cli

    cli.main()


if __name__ == "__main__":
    main()
