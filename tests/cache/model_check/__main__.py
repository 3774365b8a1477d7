"""Prints the table of `explore`."""

from tests.cache.model_check.explore import main

main()
