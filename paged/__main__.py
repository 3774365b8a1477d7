"""The command line, as `python -m paged` and as the script `paged`."""

import os
import signal


def main() -> int:
    """Run the command line. An interrupt during the first imports just ends it: there is nothing to clean up yet."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from paged.serving.command_line.cli import start

    return start()


if __name__ == "__main__":
    raise SystemExit(main())
