"""This family runs by numba too."""

from tests.backends import backend as backend
