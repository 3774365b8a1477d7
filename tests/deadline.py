"""How long a test waits for what must happen before it counts as hung."""

# A deadline, not a measure: what is waited for takes a second at most on an idle machine. A test must not fail because
# its machine is slow, so nothing that takes longer than this is compared with a time.
HANG_S = 120.0
