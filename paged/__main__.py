"""`python -m paged` is the command line."""

from paged.executors.cli import main

raise SystemExit(main())
