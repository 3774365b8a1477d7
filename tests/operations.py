"""The public operations: what `paged` exports of the kernels, but for `check_ids`, which waits for their checks."""

import paged

OPERATIONS = [
    name
    for module, names in paged._EXPORTS.items()
    for name in names
    if module.startswith("paged.kernels.") and name.islower() and name != "check_ids"
]
