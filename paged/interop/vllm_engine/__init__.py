"""vLLM's attention backend on the operations here; its modules import vLLM. docs/interop.md tells of versions."""
