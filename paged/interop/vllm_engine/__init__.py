"""vLLM's attention backend on the operations here; its modules import vLLM.

`v0_32`, `v0_33`, ... each hold what one version has of its own, in the class that is registered with it; the others are
what versions have in common. docs/interop.md says how the next one comes in.
"""
