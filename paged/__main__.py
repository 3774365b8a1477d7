"""Command line: `python -m paged` and the script `paged`."""

import os
import signal


def main() -> int:
    """Run the command line. An interrupt during the imports ends it silently, because nothing needs clean-up yet."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from paged.serving.command_line.cli import start

    return start()


if __name__ == "__main__":
    raise SystemExit(main())
